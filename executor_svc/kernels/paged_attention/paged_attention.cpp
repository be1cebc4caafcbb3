// Paged attention for decode and chunked prefill, straight from the block table.
//
// The query heads of a KV head, times some query tokens, share one pass over its keys and values. tile.h has the
// arithmetic, partition.h the softmax over a context, plan.h who works on what. A query row's result depends on its own
// context alone, bit for bit: not on the rows beside it, the chunks its prompt came in, or the number of threads.
#include <atomic>
#include <memory>

#include "../native/csrc/program.h"
#include "../native/csrc/team.h"
#include "plan.h"

namespace octavo {
namespace attention {
namespace {

// Products and sums for which waking the team does not pay.
constexpr int64_t kAlone = 64 * 1024;

struct Layer {
  const void* query;  // tokens `query_stride` elements apart
  void* out;          // [tokens][num_heads][head_dim]
  const void* keys;
  const void* values;
  int64_t query_stride;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  float scale;
};

// What the calling thread keeps: the plan of the step it is in, and the records of partitions.
struct Caller {
  int64_t step = -1;
  int64_t group = 0;
  int64_t num_kv_heads = 0;
  int threads = 0;
  Plan plan;
  Floats records;
  std::unique_ptr<std::atomic<int32_t>[]> left;  // tasks that have yet to finish, by Task::pieces and KV head
  size_t left_size = 0;
};

template <class T>
class Attention {
 public:
  Attention(const Batch& batch, const Layer& layer, Caller& caller)
      : batch_(batch),
        layer_(layer),
        caller_(caller),
        group_(layer.num_heads / layer.num_kv_heads),
        width_(width_of(layer.head_dim)),
        record_(record_floats(layer.head_dim)) {
    const Plan& plan = caller.plan;
    records_ = caller.records.at_least(plan.records * layer.num_heads * record_);
    const size_t counters = plan.pieces.size() * static_cast<size_t>(layer.num_kv_heads);
    if (caller.left_size < counters) {
      caller.left = std::make_unique<std::atomic<int32_t>[]>(counters);
      caller.left_size = counters;
    }
    for (size_t i = 0; i < counters; ++i)
      caller.left[i].store(plan.pieces[i / static_cast<size_t>(layer.num_kv_heads)], std::memory_order_relaxed);
  }

  void run() {
    run_all(caller_.plan.prefixes);
    run_all(caller_.plan.tasks);
  }

 private:
  const Batch& batch_;
  const Layer& layer_;
  Caller& caller_;
  const int64_t group_, width_, record_;
  float* records_;

  void run_all(const std::vector<Task>& tasks) {
    const int64_t count = static_cast<int64_t>(tasks.size()) * layer_.num_kv_heads;
    if (count == 0) return;
    Shares shares;
    shares.start(count, 1);
    const auto work = [&](const Member&) {
      static thread_local Scratch scratch;
      int64_t begin, end;
      while (shares.take(&begin, &end))
        run_task(tasks[static_cast<size_t>(begin / layer_.num_kv_heads)], begin % layer_.num_kv_heads, scratch);
    };
    if (count == 1 || caller_.plan.cost * layer_.head_dim < kAlone)
      work(Member{0, 1});
    else
      on_team(work);
  }

  float* record(const Records& records, int32_t entry, int32_t partition, int64_t kv_head, int64_t head) const {
    return records_ + ((records.of(entry, partition) * layer_.num_kv_heads + kv_head) * group_ + head) * record_;
  }

  void run_task(const Task& task, int64_t kv_head, Scratch& scratch) const {
    const int rows = static_cast<int>(task.count * group_);
    scratch.prepare(rows, layer_.head_dim);
    fetch_query(task, kv_head, scratch);
    const int64_t slot_stride = layer_.num_kv_heads * layer_.head_dim;
    const Context<T> context{static_cast<const T*>(layer_.keys) + kv_head * layer_.head_dim,
                             static_cast<const T*>(layer_.values) + kv_head * layer_.head_dim,
                             batch_.block_tables + task.row * batch_.table_width,
                             batch_.block_size,
                             slot_stride,
                             layer_.head_dim};
    const bool keep = task.own.partitions > 0;
    if (!keep) fold_records(task, kv_head, task.shared, 0, task.begin, scratch);
    for (int32_t partition = task.begin; partition < task.end; ++partition) {
      const int64_t begin = static_cast<int64_t>(partition) * kPartition;
      int first = 0;
      while (scratch.seen[first] <= begin) ++first;
      compute_partition(context, begin, first, rows, layer_.scale, scratch);
      for (int row = first; row < rows; ++row)
        if (keep)
          write_record(scratch.part, row, width_,
                       record(task.own, task.first + row / static_cast<int>(group_), partition - task.own_begin,
                              kv_head, row % group_));
        else
          add(scratch, row, partition == 0, scratch.part.sums + row * width_, scratch.part.maximum[row],
              scratch.part.total[row]);
    }
    if (keep) {
      if (task.pieces < 0 || !last_piece(task, kv_head)) return;
      fold_records(task, kv_head, task.shared, 0, task.own_begin, scratch);
      fold_records(task, kv_head, task.own, task.own_begin, task.own_begin + task.own.partitions, scratch);
    }
    write_out(task, kv_head, scratch);
  }

  bool last_piece(const Task& task, int64_t kv_head) const {
    return caller_.left[static_cast<size_t>(task.pieces * layer_.num_kv_heads + kv_head)].fetch_sub(
               1, std::memory_order_acq_rel) == 1;
  }

  void fetch_query(const Task& task, int64_t kv_head, const Scratch& scratch) const {
    const int64_t floats = group_ * layer_.head_dim;
    for (int32_t i = 0; i < task.count; ++i) {
      const size_t entry = static_cast<size_t>(task.first + i);
      const T* const from = static_cast<const T*>(layer_.query) + caller_.plan.tokens[entry] * layer_.query_stride +
                            kv_head * floats;
      float* const to = scratch.query + i * floats;
      for (int64_t k = 0; k < floats; ++k) to[k] = widen(from[k]);
      // A shared prefix is seen whole by all: what lies behind it is not this task's.
      const int64_t end = static_cast<int64_t>(task.end) * kPartition;
      std::fill_n(scratch.seen + i * group_, group_,
                  static_cast<int>(std::min<int64_t>(caller_.plan.seen[entry], end)));
    }
  }

  // Put one partition of one row behind those before it.
  void add(const Scratch& scratch, int row, bool first, const float* sums, float maximum, float total) const {
    const State& whole = scratch.whole;
    if (!first) return fold(sums, maximum, total, row, width_, whole);
    std::memcpy(whole.sums + row * width_, sums, static_cast<size_t>(width_) * sizeof(float));
    whole.maximum[row] = maximum;
    whole.total[row] = total;
  }

  // The partitions [begin, end) that lie in records, the first of which is of partition `begin`.
  void fold_records(const Task& task, int64_t kv_head, const Records& records, int32_t begin, int32_t end,
                    const Scratch& scratch) const {
    for (int32_t i = 0; i < task.count; ++i) {
      const int32_t seen = caller_.plan.seen[static_cast<size_t>(task.first + i)];
      for (int32_t partition = begin; partition < end && static_cast<int64_t>(partition) * kPartition < seen;
           ++partition)
        for (int64_t head = 0; head < group_; ++head) {
          const float* const kept = record(records, task.first + i, partition - begin, kv_head, head);
          add(scratch, static_cast<int>(i * group_ + head), partition == 0, kept, kept[width_], kept[width_ + 1]);
        }
    }
  }

  void write_out(const Task& task, int64_t kv_head, const Scratch& scratch) const {
    const int64_t head_dim = layer_.head_dim;
    for (int row = 0; row < task.count * group_; ++row) {
      const int64_t token = caller_.plan.tokens[static_cast<size_t>(task.first + row / group_)];
      T* const out =
          static_cast<T*>(layer_.out) + (token * layer_.num_heads + kv_head * group_ + row % group_) * head_dim;
      float* const sums = scratch.whole.sums + row * width_;
      const Vec total = broadcast(scratch.whole.total[row]);
      int64_t i = 0;
      for (; i + kLanes <= head_dim; i += kLanes) store(out + i, div(load(sums + i), total));
      if (i < head_dim) {
        T last[kLanes];
        store(last, div(load(sums + i), total));
        std::memcpy(out + i, last, static_cast<size_t>(head_dim - i) * sizeof(T));
      }
    }
  }
};

}  // namespace
}  // namespace attention
}  // namespace octavo

using namespace octavo;

// dtype is 0 for float32, 1 for bfloat16.
OCTAVO_EXPORT void octavo_paged_attention(const attention::Batch* batch, const void* query, int64_t query_stride,
                                          void* out, const void* keys, const void* values, int64_t num_heads,
                                          int64_t num_kv_heads, int64_t head_dim, float scale, int32_t dtype) {
  static thread_local attention::Caller caller;
  const int64_t group = num_heads / num_kv_heads;
  const int threads = team_size();
  if (caller.step != batch->step || caller.group != group || caller.num_kv_heads != num_kv_heads ||
      caller.threads != threads) {
    caller.plan.build(*batch, group, num_kv_heads, threads);
    caller.step = batch->step;
    caller.group = group;
    caller.num_kv_heads = num_kv_heads;
    caller.threads = threads;
  }
  const attention::Layer layer{query,     out,          keys,     values, query_stride,
                               num_heads, num_kv_heads, head_dim, scale};
  if (dtype == 0)
    attention::Attention<float>(*batch, layer, caller).run();
  else
    attention::Attention<bf16>(*batch, layer, caller).run();
}

OCTAVO_IN_PROGRAMS(octavo_paged_attention)
