// Paged attention for decode and chunked prefill, straight from the block table.
//
// The query heads of a KV head, times some query tokens, share one pass over its keys and values. dot.h and weigh.h have
// the arithmetic, partition.h the softmax over a context, plan.h who works on what. A query row's result depends on its
// own context alone, bit for bit: not on the rows beside it, the chunks its prompt came in, or the number of threads.
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
  Scores scores;
};

// What the calling thread keeps: the plans of the step it is in, and the records of partitions.
class Caller {
 public:
  Floats records;
  std::unique_ptr<std::atomic<int32_t>[]> left;  // tasks that have yet to finish, by Task::pieces
  size_t left_size = 0;

  // The plan of a step for one kind of layer, worked out at the first of them.
  const Plan& plan(const Batch& batch, int64_t step, const Shape& shape) {
    if (step != step_) used_ = 0;
    step_ = step;
    for (size_t i = 0; i < used_; ++i)
      if (plans_[i].shape == shape) return *plans_[i].plan;
    if (used_ == plans_.size()) plans_.push_back(Planned{shape, std::make_unique<Plan>()});
    Planned& planned = plans_[used_++];
    planned.shape = shape;
    planned.plan->build(batch, shape);
    return *planned.plan;
  }

 private:
  struct Planned {
    Shape shape;
    std::unique_ptr<Plan> plan;
  };
  int64_t step_ = -1;
  size_t used_ = 0;
  std::vector<Planned> plans_;
};

template <class T>
class Attention {
 public:
  Attention(const Batch& batch, const Layer& layer, const Plan& plan, Caller& caller)
      : batch_(batch),
        layer_(layer),
        plan_(plan),
        group_(static_cast<int>(layer.num_heads / layer.num_kv_heads)),
        width_(width_of<T>(layer.head_dim)),
        record_(record_floats(width_)),
        records_(caller.records.at_least(plan.records * group_ * record_)) {
    if (caller.left_size < plan.pieces.size()) {
      caller.left = std::make_unique<std::atomic<int32_t>[]>(plan.pieces.size());
      caller.left_size = plan.pieces.size();
    }
    left_ = caller.left.get();
    for (size_t i = 0; i < plan.pieces.size(); ++i) left_[i].store(plan.pieces[i], std::memory_order_relaxed);
  }

  void run() {
    run_all(plan_.prefixes);
    run_all(plan_.tasks);
  }

 private:
  const Batch& batch_;
  const Layer& layer_;
  const Plan& plan_;
  const int group_;
  const int64_t width_, record_;
  float* const records_;
  std::atomic<int32_t>* left_;

  void run_all(const std::vector<Task>& tasks) {
    const int64_t count = static_cast<int64_t>(tasks.size());
    if (count == 0) return;
    Shares shares;
    shares.start(count, 1);
    const int64_t others = team_size() - 1;
    const auto work = [&] {
      static thread_local Scratch scratch;
      int64_t at, next, end;
      for (bool more = shares.take(&at, &end); more; at = next) {
        // While there are plenty, the next task is taken early, so that its first keys are fetched in time.
        const bool early = at + 2 * others < count && shares.take(&next, &end);
        run_task(tasks[static_cast<size_t>(at)], early ? &tasks[static_cast<size_t>(next)] : nullptr, scratch);
        more = early || shares.take(&next, &end);
      }
    };
    if (count == 1 || plan_.cost * layer_.head_dim < kAlone)
      work();
    else
      on_team(work);
  }

  Context<T> context_of(const Task& task) const {
    const int64_t offset = task.head * layer_.head_dim;
    return Context<T>{static_cast<const T*>(layer_.keys) + offset,
                      static_cast<const T*>(layer_.values) + offset,
                      batch_.block_tables + task.row * batch_.table_width,
                      batch_.block_size,
                      layer_.num_kv_heads * layer_.head_dim,
                      layer_.head_dim};
  }

  int64_t from(const Task& task, int row) const {
    return plan_.from[static_cast<size_t>(task.first + row / group_)];
  }
  int64_t seen(const Task& task, int row) const {
    return plan_.seen[static_cast<size_t>(task.first + row / group_)];
  }

  // The tokens of a partition that a task reads itself, for its rows together.
  Next<T> own_part(const Context<T>& context, const Task& task, int32_t partition) const {
    if (partition >= task.end || task.shared.has_all(partition)) return Next<T>{nullptr, 0, 0};
    const int64_t first = std::max<int64_t>(task.shared.rest(partition), from(task, 0) / kStretch * kStretch);
    const int64_t end = std::min<int64_t>((partition + 1) * kPartition, task.limit);
    return Next<T>{&context, first, std::max<int64_t>(0, end - first)};
  }

  // `next` is the task that this thread works on afterwards, where that is known.
  void run_task(const Task& task, const Task* next, Scratch& scratch) const {
    const int rows = task.count * group_;
    scratch.prepare(task.heads, rows, width_);
    fetch_query(task, scratch);
    const Context<T> context = context_of(task), next_context = next ? context_of(*next) : context;
    Chunks<T> chunks(context, layer_.scores, task.heads, rows, scratch);
    const bool keep = task.own.partitions > 0;
    int first = 0;
    for (int32_t partition = task.begin; partition < task.end; ++partition) {
      const int64_t begin = static_cast<int64_t>(partition) * kPartition, end = begin + kPartition;
      // The rows that see some of it.
      while (first < rows && scratch.seen[first] <= begin) ++first;
      int last = rows;
      while (last > first && scratch.from[last - 1] >= end) --last;
      if (task.shared.has_all(partition)) {
        if (!keep) fold_records(task, task.shared.records, partition, scratch);
        continue;
      }
      const int64_t rest = task.shared.rest(partition);
      for_rows(task, first, last, [&](int32_t head, int row, int at) {
        if (rest > begin)
          read_record(record(task, task.shared.records, partition, head, row), width_, scratch.part, at);
        else
          scratch.part.clear(at, width_);
      });
      Next<T> after = own_part(context, task, partition + 1);
      if (next && partition + 1 == task.end) after = own_part(next_context, *next, next->begin);
      chunks.run(rest, std::min<int64_t>(end, task.limit), after);
      for_rows(task, first, last, [&](int32_t head, int row, int at) {
        if (keep)
          write_record(scratch.part, at, width_, record(task, task.own, partition, head, row));
        else
          fold(task, partition, row, at, scratch.part.sums + at * width_, scratch.part.lanes + at * kLanes,
               scratch.part.maximum[at], scratch);
      });
    }
    if (keep) {
      if (task.pieces < 0 || !last_piece(task)) return;
      const int32_t begin = task.own.first_partition;
      for (int32_t partition = begin; partition < begin + task.own.partitions; ++partition)
        fold_records(task, task.shared.has_all(partition) ? task.shared.records : task.own, partition, scratch);
    }
    write_out(task, scratch);
  }

  bool last_piece(const Task& task) const { return left_[task.pieces].fetch_sub(1, std::memory_order_acq_rel) == 1; }

  // Call f(KV head, row of the head, row of the task) for the rows [first, last) of each head.
  template <class F>
  void for_rows(const Task& task, int first, int last, const F& f) const {
    for (int32_t head = 0; head < task.heads; ++head)
      for (int row = first; row < last; ++row) f(task.head + head, row, head * task.count * group_ + row);
  }

  float* record(const Task& task, const Records& records, int32_t partition, int32_t head, int row) const {
    return records_ + (records.of(task.first + row / group_, partition, head) * group_ + row % group_) * record_;
  }

  void fetch_query(const Task& task, const Scratch& scratch) const {
    const int rows = task.count * group_;
    for_rows(task, 0, rows, [&](int32_t head, int row, int at) {
      const int64_t token = plan_.tokens[static_cast<size_t>(task.first + row / group_)];
      const T* const query = static_cast<const T*>(layer_.query) + token * layer_.query_stride;
      spread(query + (head * group_ + row % group_) * layer_.head_dim, layer_.head_dim, width_,
             scratch.query + at * width_);
    });
    for (int row = 0; row < rows; ++row) {
      scratch.from[row] = static_cast<int>(from(task, row));
      scratch.seen[row] = static_cast<int>(seen(task, row));
    }
  }

  // Put one partition of one row behind those before it.
  void fold(const Task& task, int32_t partition, int row, int at, const float* sums, const float* lanes, float maximum,
            const Scratch& scratch) const {
    scratch.whole.fold(at, partition == from(task, row) / kPartition, sums, lanes, maximum, width_);
  }

  // The same for all rows that see some of a partition that lies in records.
  void fold_records(const Task& task, const Records& records, int32_t partition, const Scratch& scratch) const {
    const int64_t begin = static_cast<int64_t>(partition) * kPartition, end = begin + kPartition;
    for_rows(task, 0, task.count * group_, [&](int32_t head, int row, int at) {
      if (seen(task, row) <= begin || from(task, row) >= end) return;
      const float* const kept = record(task, records, partition, head, row);
      fold(task, partition, row, at, kept, kept + width_, kept[width_ + kLanes], scratch);
    });
  }

  void write_out(const Task& task, const Scratch& scratch) const {
    const int64_t head_dim = layer_.head_dim;
    for_rows(task, 0, task.count * group_, [&](int32_t head, int row, int at) {
      const int64_t token = plan_.tokens[static_cast<size_t>(task.first + row / group_)];
      T* const out = static_cast<T*>(layer_.out) + (token * layer_.num_heads + head * group_ + row % group_) * head_dim;
      float* const sums = scratch.whole.sums + at * width_;
      const Vec total = broadcast(scratch.whole.total[at]);
      for (int64_t i = 0; i < width_; i += kLanes) store(sums + i, div(load(sums + i), total));
      gather(sums, head_dim, width_, out);
    });
  }
};

}  // namespace
}  // namespace attention
}  // namespace octavo

using namespace octavo;

// dtype is 0 for float32, 1 for bfloat16. window and soft_cap are 0 where there is none.
OCTAVO_EXPORT void octavo_paged_attention(const attention::Batch* batch, const void* query, int64_t query_stride,
                                          void* out, const void* keys, const void* values, int64_t num_heads,
                                          int64_t num_kv_heads, int64_t head_dim, float scale, int64_t window,
                                          float soft_cap, int32_t dtype) {
  static thread_local attention::Caller caller;
  // A window as wide as every context is none.
  const int32_t longest = *std::max_element(batch->context_lens, batch->context_lens + batch->rows);
  const int64_t element = dtype == 0 ? sizeof(float) : sizeof(bf16);
  const attention::Shape shape{num_heads / num_kv_heads, num_kv_heads, head_dim * element,
                               window < longest ? window : 0, team_size()};
  const attention::Layer layer{query,        out,      keys, values, query_stride, num_heads,
                               num_kv_heads, head_dim, attention::Scores{scale, soft_cap}};
  const attention::Plan& plan = caller.plan(*batch, batch->step, shape);
  if (dtype == 0)
    attention::Attention<float>(*batch, layer, plan, caller).run();
  else
    attention::Attention<bf16>(*batch, layer, plan, caller).run();
}

OCTAVO_IN_PROGRAMS(octavo_paged_attention)
