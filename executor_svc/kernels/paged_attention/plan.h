// How one step's attention is cut into tasks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "context.h"

namespace octavo {
namespace attention {

// One step's ragged batch, as cpu.py lays it out.
struct Batch {
  const int32_t* block_tables;  // [rows][table_width]
  const int32_t* context_lens;  // [rows]
  const int32_t* query_start;   // [rows + 1]
  int64_t table_width;
  int64_t rows;
  int64_t block_size;
  int64_t step;  // names the batch: calls with the same one have the same batch
};

// What a plan depends on beside the batch.
struct Shape {
  int64_t group;  // query heads of a KV head
  int64_t num_kv_heads;
  int64_t head_bytes;  // of one token's key
  int64_t window;      // 0: none
  int threads;
  int partition;   // tokens that are worked out apart, then folded in order
  int chunk;       // tokens of a partition that can be shared: whole chunks from its first on
  int most_rows;   // query rows of a task
  int most_heads;  // KV heads of a task
  bool operator==(const Shape&) const = default;
};

// Query rows of a KV head that are few: their keys and values are not worth a copy.
constexpr int kFewRows = 8;
// What fetching them costs, in query rows.
constexpr int kFetchingRows = 6;
// A task of few query rows reads the KV heads of a token in one go, as they lie, up to this much of its key: what is
// fetched ahead must stay in the second-level cache.
constexpr int64_t kTokenBytes = 8 * 1024;

// Where partitions of a range of entries lie: for each entry, partition and KV head, the records of its query heads.
struct Records {
  int64_t start = 0;
  int32_t first_entry = 0;
  int32_t first_partition = 0, partitions = 0;
  int32_t first_head = 0, heads = 0;

  int64_t of(int32_t entry, int32_t partition, int32_t head) const {
    const int64_t at = static_cast<int64_t>(entry - first_entry) * partitions + partition - first_partition;
    return start + at * heads + head - first_head;
  }
};

// Tokens of a context whose states others work out: whole chunks, from a partition's first token on.
struct Shared {
  int32_t begin = 0, end = 0;  // tokens
  Records records;
  bool folded = false;  // the partitions into one record each, as if of the first

  // Of partitions of `size` tokens.
  bool has_all(int32_t partition, int32_t size) const {
    return partition * size >= begin && (partition + 1) * size <= end;
  }
  bool has_record(int32_t partition, int32_t size) const { return !folded || partition * size == begin; }
  // Where the rest of a partition begins.
  int32_t rest(int32_t partition, int32_t size) const {
    const int32_t at = partition * size;
    return at >= begin && at < end ? std::min(end, at + size) : at;
  }
};

// Query tokens that read the same blocks, KV heads, and partitions of the context.
struct Task {
  int32_t row;            // whose block table is read
  int32_t first, count;   // entries of Plan::tokens
  int32_t head, heads;    // KV heads
  int32_t begin, end;     // partitions
  int32_t limit;          // tokens from there on are not this task's
  Shared shared;
  Records own;            // own.partitions is 0 where the partitions are folded as they come
  bool keeps_whole;       // in own what they fold to, and nothing else
  int32_t pieces;         // index of the count of tasks that have yet to finish with these entries; -1 where it is one
  int64_t cost;
};

class Plan {
 public:
  std::vector<int32_t> tokens;  // rows that share a prefix side by side, each row's in order
  std::vector<int32_t> from;    // the context that each sees: [from, seen)
  std::vector<int32_t> seen;
  std::vector<Task> prefixes;   // what several rows share: first
  std::vector<Task> tasks;      // then everything else
  int64_t records = 0;          // of one of a KV head's query heads
  std::vector<int32_t> pieces;  // how many tasks have yet to finish
  int64_t cost = 0;

  void build(const Batch& batch, const Shape& shape) {
    batch_ = &batch;
    shape_ = shape;
    tokens.clear();
    from.clear();
    seen.clear();
    prefixes.clear();
    tasks.clear();
    pieces.clear();
    records = cost = 0;
    // Some tasks for every thread, where there are tokens enough.
    const int64_t fair = batch.query_start[batch.rows] * shape.num_kv_heads / (shape.threads * 4);
    task_tokens_ = static_cast<int32_t>(std::max<int64_t>(1, std::min<int64_t>(shape.most_rows / shape.group, fair)));
    few_heads_ = heads_together();
    order_.resize(static_cast<size_t>(batch.rows));
    for (int32_t row = 0; row < batch.rows; ++row) order_[static_cast<size_t>(row)] = row;
    bring_sharers_together();
    for (size_t at = 0; at < order_.size();) at = add_rows(at);
    for (const Task& task : prefixes) cost += task.cost;
    for (const Task& task : tasks) cost += task.cost;
    if (shape.threads > 1) split_long(cost / (shape.threads * 4) + 1);
    const auto costlier = [](const Task& a, const Task& b) { return a.cost > b.cost; };
    std::stable_sort(prefixes.begin(), prefixes.end(), costlier);
    std::stable_sort(tasks.begin(), tasks.end(), costlier);
  }

 private:
  const Batch* batch_ = nullptr;
  Shape shape_{};
  int32_t task_tokens_ = 1;
  int32_t few_heads_ = 1;       // KV heads of a task of few query rows
  std::vector<int32_t> order_;  // rows

  const int32_t* blocks(int32_t row) const { return batch_->block_tables + row * batch_->table_width; }
  int32_t query_len(int32_t row) const { return batch_->query_start[row + 1] - batch_->query_start[row]; }

  // The first token that the query token at a position sees.
  int32_t from_of(int32_t position) const {
    return shape_.window > 0 ? static_cast<int32_t>(std::max<int64_t>(0, position + 1 - shape_.window)) : 0;
  }

  // The partitions that the query tokens of a row see some of.
  int32_t partitions_of(int32_t row) const {
    const int32_t context = batch_->context_lens[row];
    return (context + shape_.partition - 1) / shape_.partition - from_of(context - query_len(row)) / shape_.partition;
  }

  // All KV heads where every thread gets some partitions nevertheless.
  int32_t heads_together() const {
    const int64_t most = std::min<int64_t>(shape_.most_heads, shape_.num_kv_heads);
    int64_t heads = std::clamp<int64_t>(kTokenBytes / shape_.head_bytes, 1, most);
    if (shape_.threads > 1) {
      int64_t partitions = 0;
      for (int32_t row = 0; row < batch_->rows; ++row) partitions += partitions_of(row);
      heads = std::clamp<int64_t>(shape_.num_kv_heads * partitions / (2 * shape_.threads), 1, heads);
    }
    return static_cast<int32_t>(heads);
  }

  // ---- prefixes that rows share ----

  // The tokens [begin, end) that every query token of a row sees: from a partition's first on, and whole chunks.
  int32_t common_begin(int32_t row) const {
    return (from_of(batch_->context_lens[row] - 1) + shape_.partition - 1) / shape_.partition * shape_.partition;
  }
  int32_t common_end(int32_t row) const {
    return (batch_->context_lens[row] - query_len(row) + 1) / shape_.chunk * shape_.chunk;
  }

  // The blocks of a row from that of a token on.
  const int32_t* blocks_from(int32_t row, int32_t token) const { return blocks(row) + token / batch_->block_size; }
  size_t blocks_between(int32_t begin, int32_t end) const {
    return begin < end ? static_cast<size_t>((end - 1) / batch_->block_size - begin / batch_->block_size + 1) : 0;
  }

  // How far the blocks of two rows are the same, from a token on that both see: the end of the last such chunk.
  int32_t shared_end(int32_t a, int32_t b) const {
    const int32_t begin = common_begin(a);
    if (common_begin(b) != begin) return begin;
    const int32_t end = std::min(common_end(a), common_end(b));
    const size_t count = blocks_between(begin, end);
    const int32_t* const first = blocks_from(a, begin);
    const size_t same = static_cast<size_t>(std::mismatch(first, first + count, blocks_from(b, begin)).first - first);
    if (same == count) return std::max(begin, end);
    const int64_t until = (begin / batch_->block_size + static_cast<int64_t>(same)) * batch_->block_size;
    return std::max(begin, static_cast<int32_t>(until / shape_.chunk * shape_.chunk));
  }

  // Rows whose common tokens lie in the same blocks become neighbours, the longer they do the nearer.
  void bring_sharers_together() {
    if (batch_->rows < 2) return;
    std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
      const int32_t begin = common_begin(a), other = common_begin(b);
      if (begin != other) return begin < other;
      const int32_t* const first = blocks_from(a, begin);
      const int32_t* const second = blocks_from(b, begin);
      const int32_t* const first_end = first + blocks_between(begin, common_end(a));
      const int32_t* const second_end = second + blocks_between(begin, common_end(b));
      const auto [x, y] = std::mismatch(first, first_end, second, second_end);
      if (x != first_end && y != second_end) return *x < *y;
      if ((x == first_end) != (y == second_end)) return x == first_end;
      return a < b;
    });
  }

  // Rows of the order from one on, what all of them share, and how many tokens are read less for it.
  struct Group {
    size_t end;
    int32_t shared;
    int64_t spared;
  };

  // As many rows as spare most.
  Group group_at(size_t at) const {
    const int32_t leader = order_[at], begin = common_begin(leader);
    Group best{at + 1, begin, 0};
    for (size_t i = at + 1; i < order_.size(); ++i) {
      const int32_t until = shared_end(leader, order_[i]);
      if (until == begin) break;
      const int64_t spared = static_cast<int64_t>(until - begin) * static_cast<int64_t>(i - at);
      if (spared >= best.spared) best = Group{i + 1, until, spared};
    }
    return best;
  }

  // Add the tasks of the row at `at` of the order and of those that share a prefix with it; return where they end.
  size_t add_rows(size_t at) {
    const int32_t leader = order_[at], begin = common_begin(leader);
    const Group group = group_at(at);
    // A row that shares little must not keep the others from sharing more.
    if (group.spared == 0 || (at + 1 < order_.size() && group_at(at + 1).spared > group.spared)) {
      add_row(leader, Shared{});
      return at + 1;
    }
    const int32_t first = static_cast<int32_t>(tokens.size());
    int32_t count = 0;
    for (size_t i = at; i < group.end; ++i) count += query_len(order_[i]);
    const int32_t first_partition = begin / shape_.partition;
    const int32_t last_partition = (group.shared + shape_.partition - 1) / shape_.partition;
    const int32_t heads = static_cast<int32_t>(shape_.num_kv_heads);
    // Whole partitions that every row begins with are folded right there, where there are tasks enough for all threads.
    const int64_t parts = (count + task_tokens_ - 1) / task_tokens_ * heads;
    const bool folded = shape_.chunk == shape_.partition && shape_.window == 0 && parts >= 2 * shape_.threads;
    const int32_t end = folded ? first_partition + 1 : last_partition;
    const Shared kept{begin, group.shared, reserve(first, count, first_partition, end, 0, heads), folded};
    for (size_t i = at; i < group.end; ++i) add_row(order_[i], kept);
    const int32_t step = folded ? last_partition - first_partition : 1;
    for (int32_t partition = first_partition; partition < last_partition; partition += step) {
      const int32_t limit = std::min(group.shared, (partition + step) * shape_.partition);
      deal_out(count, [&](int32_t entry, int32_t size) {
        add(prefixes, Task{leader, first + entry, size, 0, 0, partition, partition + step, limit, Shared{},
                           kept.records, folded, -1, price(limit - partition * shape_.partition, size)});
      });
    }
    return group.end;
  }

  // ---- tasks ----

  // Add the tasks of one row, some of whose context others may work out.
  void add_row(int32_t row, const Shared& shared) {
    const int32_t first = static_cast<int32_t>(tokens.size()), count = query_len(row);
    const int32_t before = batch_->context_lens[row] - count;
    for (int32_t i = 0; i < count; ++i) {
      tokens.push_back(batch_->query_start[row] + i);
      from.push_back(from_of(before + i));
      seen.push_back(before + i + 1);
    }
    deal_out(count, [&](int32_t entry, int32_t size) {
      const int32_t begin = from[static_cast<size_t>(first + entry)];
      const int32_t end = seen[static_cast<size_t>(first + entry + size - 1)];
      const int32_t first_partition = begin / shape_.partition;
      const int32_t last_partition = (end + shape_.partition - 1) / shape_.partition;
      add(tasks, Task{row, first + entry, size, 0, 0, first_partition, last_partition, end, shared, Records{}, false,
                      -1, price(end - begin - (shared.end - shared.begin), size)});
    });
  }

  template <class F>
  void deal_out(int32_t count, const F& f) const {
    int32_t begin = 0;
    for (int32_t parts = (count + task_tokens_ - 1) / task_tokens_; parts > 0; --parts) {
      const int32_t size = (count - begin) / parts;
      f(begin, size);
      begin += size;
    }
  }

  // Add a task for the KV heads, one by one or some together.
  void add(std::vector<Task>& to, Task task) const {
    const int32_t num_kv_heads = static_cast<int32_t>(shape_.num_kv_heads);
    const int32_t together = task.count * shape_.group <= kFewRows ? few_heads_ : 1;
    const int64_t cost_of_head = task.cost;
    for (int32_t parts = (num_kv_heads + together - 1) / together; parts > 0; --parts) {
      task.heads = (num_kv_heads - task.head) / parts;
      task.cost = cost_of_head * task.heads;
      to.push_back(task);
      task.head += task.heads;
    }
  }

  int64_t price(int64_t context, int64_t query_tokens) const {
    return std::max<int64_t>(context, 16) * (query_tokens * shape_.group + kFetchingRows);
  }

  Records reserve(int32_t first, int32_t count, int32_t begin, int32_t end, int32_t head, int32_t heads) {
    const Records kept{records, first, begin, end - begin, head, heads};
    records += static_cast<int64_t>(count) * (end - begin) * heads;
    return kept;
  }

  // Cut tasks that cost much more than `most` into pieces of whole partitions.
  void split_long(int64_t most) {
    const size_t count = tasks.size();
    for (size_t i = 0; i < count; ++i) {
      const Task whole = tasks[i];
      // What lies before a shared prefix stays with the first piece.
      const int32_t cut = std::max(whole.begin, whole.shared.end / shape_.partition), partitions = whole.end - cut;
      const int64_t wanted = std::min<int64_t>(partitions, whole.cost / most);
      if (wanted < 2) continue;
      const int32_t size = static_cast<int32_t>((partitions + wanted - 1) / wanted);
      const Records own = reserve(whole.first, whole.count, whole.begin, whole.end, whole.head, whole.heads);
      const int32_t counter = static_cast<int32_t>(pieces.size());
      pieces.push_back((partitions + size - 1) / size);
      for (int32_t begin = cut; begin < whole.end; begin += size) {
        Task piece = whole;
        piece.begin = begin == cut ? whole.begin : begin;
        piece.end = std::min(whole.end, begin + size);
        piece.own = own;
        piece.pieces = counter;
        piece.cost = whole.cost * (piece.end - begin) / partitions;
        if (begin == cut)
          tasks[i] = piece;
        else
          tasks.push_back(piece);
      }
    }
  }
};

}  // namespace attention
}  // namespace octavo
