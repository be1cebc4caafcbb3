// Paged attention for decode and chunked prefill, straight from the block table.
//
// The query heads of a KV head, times some query tokens, share one pass over its keys and values. partition.h has a
// partition of a context by vectors, tiles.h by tiles, fold.h what is made of partitions, plan.h who works on what. A
// query row's result depends on its own context alone, bit for bit: not on the rows beside it, the chunks its prompt
// came in, or the number of threads.
#include <atomic>
#include <memory>

#include "../native/csrc/program.h"
#include "../native/csrc/shares.h"
#include "partition.h"
#include "plan.h"
#include "tiles.h"

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

// `Kind` is how partitions are worked out: ByVectors or ByTiles.
template <class Kind>
class Attention {
 public:
  using T = typename Kind::Element;
  using Scratch = typename Kind::Scratch;

  Attention(const Batch& batch, const Layer& layer, const Plan& plan, Caller& caller)
      : batch_(batch),
        layer_(layer),
        plan_(plan),
        group_(static_cast<int>(layer.num_heads / layer.num_kv_heads)),
        width_(Kind::width(layer.head_dim)),
        record_(Kind::record_floats(width_)),
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
  static constexpr int kPartition = Kind::kPartition;

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
    shares.start_in_order(count, 1);
    const int64_t others = team_size() - 1;
    const auto work = [&] {
      [[maybe_unused]] const typename Kind::Lent lent;
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

  // The tokens of the first partition, from one on, that a task reads itself, for its rows together.
  Next<T> own_part(const Context<T>& context, const Task& task, int32_t partition) const {
    while (partition < task.end && task.shared.has_all(partition, kPartition)) ++partition;
    if (partition >= task.end) return Next<T>{nullptr, 0, 0};
    const int64_t rest = task.shared.rest(partition, kPartition);
    const int64_t first = std::max<int64_t>(rest, from(task, 0) / kStretch * kStretch);
    const int64_t end = std::min<int64_t>((partition + 1) * kPartition, task.limit);
    return Next<T>{&context, first, std::max<int64_t>(0, end - first)};
  }

  // `next` is the task that this thread works on afterwards, where that is known.
  void run_task(const Task& task, const Task* next, Scratch& scratch) const {
    const int rows = task.count * group_;
    scratch.prepare(task.heads, rows, layer_.head_dim);
    fetch_query(task, scratch);
    const Context<T> context = context_of(task), next_context = next ? context_of(*next) : context;
    typename Kind::Chunks chunks(context, layer_.scores, task.heads, rows, scratch);
    const bool keep = task.own.partitions > 0 && !task.keeps_whole;
    scratch.whole.clear(task.heads * scratch.stride, width_);
    int first = 0;
    for (int32_t partition = task.begin; partition < task.end; ++partition) {
      const int64_t begin = static_cast<int64_t>(partition) * kPartition, end = begin + kPartition;
      // The rows that see some of it.
      while (first < rows && scratch.seen[first] <= begin) ++first;
      int last = rows;
      while (last > first && scratch.from[last - 1] >= end) --last;
      if (task.shared.has_all(partition, kPartition)) {
        if (!keep) fold_shared(task, partition, scratch);
        continue;
      }
      const int64_t rest = task.shared.rest(partition, kPartition);
      // Whole partitions are made anew.
      if constexpr (Kind::kChunk < kPartition)
        for_rows(task, first, last, [&](int32_t head, int row) {
          const int at = static_cast<int>((head - task.head) * scratch.stride) + row;
          if (rest > begin)
            scratch.part.read_record(record(task, task.shared.records, partition, head, row), width_, at);
          else
            scratch.part.clear(at, width_);
        });
      Next<T> after = own_part(context, task, partition + 1);
      if (next && !after.context) after = own_part(next_context, *next, next->begin);
      chunks.run(rest, std::min<int64_t>(end, task.limit), first, last, after,
                 [&](int head, int row, int end_row, const auto& parts) {
                   if (keep)
                     for (int i = 0; row + i < end_row; ++i)
                       parts.write_record(i, record(task, task.own, partition, task.head + head, row + i));
                   else
                     fold(head, row, end_row, scratch, [&](int i) { return parts.part(i); });
                 });
    }
    if (keep) {
      if (task.pieces < 0 || !last_piece(task)) return;
      const int32_t begin = task.own.first_partition;
      for (int32_t partition = begin; partition < begin + task.own.partitions; ++partition)
        if (task.shared.has_all(partition, kPartition))
          fold_shared(task, partition, scratch);
        else
          fold_records(task, task.own, partition, scratch);
    }
    if (task.keeps_whole)
      keep_whole(task, scratch);
    else
      write_out(task, scratch);
  }

  bool last_piece(const Task& task) const { return left_[task.pieces].fetch_sub(1, std::memory_order_acq_rel) == 1; }

  // Call f(KV head, row of the head) for the rows [first, last) of each head.
  template <class F>
  void for_rows(const Task& task, int first, int last, const F& f) const {
    for (int32_t head = task.head; head < task.head + task.heads; ++head)
      for (int row = first; row < last; ++row) f(head, row);
  }

  float* record(const Task& task, const Records& records, int32_t partition, int32_t head, int row) const {
    return records_ + (records.of(task.first + row / group_, partition, head) * group_ + row % group_) * record_;
  }

  void fetch_query(const Task& task, const Scratch& scratch) const {
    const int rows = task.count * group_;
    for_rows(task, 0, rows, [&](int32_t head, int row) {
      const T* const query = static_cast<const T*>(layer_.query) + token(task, row) * layer_.query_stride;
      const T* const own = query + (head * group_ + row % group_) * layer_.head_dim;
      scratch.put_query(head - task.head, row, own, layer_.head_dim);
    });
    for (int row = 0; row < rows; ++row) {
      scratch.from[row] = static_cast<int>(from(task, row));
      scratch.seen[row] = static_cast<int>(seen(task, row));
    }
  }

  // Put a partition of the rows [row, end) of a task's KV head behind those before it: part(i) is that of row + i.
  template <class F>
  void fold(int head, int row, int end, const Scratch& scratch, const F& part) const {
    Part parts[kLanes];
    for (int i = 0; row + i < end; i += kLanes) {
      const int count = std::min(kLanes, end - row - i);
      for (int j = 0; j < count; ++j) parts[j] = part(i + j);
      scratch.whole.template fold<Kind::exp>(head * scratch.stride + row + i, count, parts, width_);
    }
  }

  // The same for all rows that see some of a partition that lies in records.
  void fold_records(const Task& task, const Records& records, int32_t partition, const Scratch& scratch) const {
    const int64_t begin = static_cast<int64_t>(partition) * kPartition, end = begin + kPartition;
    int first = 0, last = task.count * group_;
    while (first < last && seen(task, first) <= begin) ++first;
    while (last > first && from(task, last - 1) >= end) --last;
    for (int head = 0; head < task.heads; ++head)
      fold(head, first, last, scratch, [&](int i) {
        return Kind::part_of_record(record(task, records, partition, task.head + head, first + i), width_);
      });
  }

  void fold_shared(const Task& task, int32_t partition, const Scratch& scratch) const {
    if (task.shared.has_record(partition, kPartition)) fold_records(task, task.shared.records, partition, scratch);
  }

  // Folded into nothing these records give what they were made of.
  void keep_whole(const Task& task, const Scratch& scratch) const {
    for_rows(task, 0, task.count * group_, [&](int32_t head, int row) {
      const int64_t at = (head - task.head) * scratch.stride + row;
      Kind::write_whole(scratch.whole, at, width_, record(task, task.own, task.begin, head, row));
    });
  }

  int64_t token(const Task& task, int row) const {
    return plan_.tokens[static_cast<size_t>(task.first + row / group_)];
  }

  void write_out(const Task& task, const Scratch& scratch) const {
    const int64_t head_dim = layer_.head_dim;
    for_rows(task, 0, task.count * group_, [&](int32_t head, int row) {
      T* const out = static_cast<T*>(layer_.out) +
                     (token(task, row) * layer_.num_heads + head * group_ + row % group_) * head_dim;
      scratch.write_out((head - task.head) * scratch.stride + row, head_dim, out);
    });
  }
};

// Attention of bfloat16.
#if defined(OCTAVO_TILES)
using Best = ByTiles;
#else
using Best = ByVectors<bf16>;
#endif

template <class Kind>
void attend(const Batch& batch, const Layer& layer, int64_t window) {
  static thread_local Caller caller;
  // A window as wide as every context is none.
  const int32_t longest = *std::max_element(batch.context_lens, batch.context_lens + batch.rows);
  const int64_t head_bytes = layer.head_dim * static_cast<int64_t>(sizeof(typename Kind::Element));
  const Shape shape{layer.num_heads / layer.num_kv_heads, layer.num_kv_heads, head_bytes, window < longest ? window : 0,
                    team_size(), Kind::kPartition, Kind::kChunk, Kind::kMostRows, Kind::kMostHeads};
  Attention<Kind>(batch, layer, caller.plan(batch, batch.step, shape), caller).run();
}

}  // namespace
}  // namespace attention
}  // namespace octavo

using namespace octavo;

// dtype is 0 for float32, 1 for bfloat16. window and soft_cap are 0 where there is none.
OCTAVO_EXPORT void octavo_paged_attention(const attention::Batch* batch, const void* query, int64_t query_stride,
                                          void* out, const void* keys, const void* values, int64_t num_heads,
                                          int64_t num_kv_heads, int64_t head_dim, float scale, int64_t window,
                                          float soft_cap, int32_t dtype) {
  const attention::Layer layer{query,        out,      keys, values, query_stride, num_heads,
                               num_kv_heads, head_dim, attention::Scores{scale, soft_cap}};
  if (dtype == 0)
    attention::attend<attention::ByVectors<float>>(*batch, layer, window);
  else
    attention::attend<attention::Best>(*batch, layer, window);
}

OCTAVO_IN_PROGRAMS(octavo_paged_attention)
