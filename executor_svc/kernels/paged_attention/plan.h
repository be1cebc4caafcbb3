// How one step's attention is cut into tasks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "partition.h"

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

// Most query rows of a task: enough that turning the keys and fetching the values costs little beside what they are used for.
constexpr int kTaskRows = 192;
// What those cost, in query rows.
constexpr int kTurningRows = 6;

// Where partitions of a range of entries lie, one record for each entry, partition and query head.
struct Records {
  int64_t start = 0;
  int32_t first_entry = 0;
  int32_t partitions = 0;  // from 0 or, in a task's own, from its first

  int64_t of(int32_t entry, int32_t partition) const {
    return start + static_cast<int64_t>(entry - first_entry) * partitions + partition;
  }
};

// Query tokens that read the same blocks, and partitions of their context.
struct Task {
  int32_t row;           // whose block table is read
  int32_t first, count;  // entries of Plan::tokens
  int32_t begin, end;    // partitions
  int32_t own_begin;     // the first that is not shared
  Records shared, own;   // own.partitions is 0 where the partitions are folded as they come
  int32_t pieces;        // index of the count of tasks that have yet to finish with these entries; -1 where it is one
  int64_t cost;
};

class Plan {
 public:
  std::vector<int32_t> tokens;  // rows that share a prefix side by side, each row's in order
  std::vector<int32_t> seen;    // tokens of the context that each sees
  std::vector<Task> prefixes;   // what several rows share: first
  std::vector<Task> tasks;      // then everything else
  int64_t records = 0;          // of one KV head and one of its query heads
  std::vector<int32_t> pieces;  // how many tasks have yet to finish
  int64_t cost = 0;

  // group: query heads of a KV head. threads: how many will share num_kv_heads times these tasks.
  void build(const Batch& batch, int64_t group, int64_t num_kv_heads, int threads) {
    batch_ = &batch;
    tokens.clear();
    seen.clear();
    prefixes.clear();
    tasks.clear();
    pieces.clear();
    records = cost = 0;
    // Some tasks for every thread, where there are tokens enough.
    const int64_t fair = batch.query_start[batch.rows] * num_kv_heads / (threads * 4);
    task_tokens_ = static_cast<int32_t>(std::max<int64_t>(1, std::min(kTaskRows / group, fair)));
    group_ = group;
    order_.resize(static_cast<size_t>(batch.rows));
    for (int32_t row = 0; row < batch.rows; ++row) order_[static_cast<size_t>(row)] = row;
    bring_sharers_together();
    for (size_t at = 0; at < order_.size();) at = add_rows(at);
    for (const Task& task : prefixes) cost += task.cost;
    for (const Task& task : tasks) cost += task.cost;
    if (threads > 1) split_long(cost * num_kv_heads / (threads * 4) + 1, num_kv_heads);
    const auto costlier = [](const Task& a, const Task& b) { return a.cost > b.cost; };
    std::stable_sort(prefixes.begin(), prefixes.end(), costlier);
    std::stable_sort(tasks.begin(), tasks.end(), costlier);
    cost *= num_kv_heads;
  }

 private:
  const Batch* batch_ = nullptr;
  int64_t group_ = 1;
  int32_t task_tokens_ = 1;
  std::vector<int32_t> order_;  // rows

  const int32_t* blocks(int32_t row) const { return batch_->block_tables + row * batch_->table_width; }
  int32_t query_len(int32_t row) const { return batch_->query_start[row + 1] - batch_->query_start[row]; }

  // Partitions that every query token of a row sees whole.
  int32_t shareable(int32_t row) const {
    return (batch_->context_lens[row] - query_len(row) + 1) / kPartition;
  }

  size_t blocks_of(int32_t partitions) const {
    return static_cast<size_t>((static_cast<int64_t>(partitions) * kPartition + batch_->block_size - 1) /
                               batch_->block_size);
  }

  bool share(int32_t a, int32_t b, int32_t partitions) const {
    return std::memcmp(blocks(a), blocks(b), blocks_of(partitions) * sizeof(int32_t)) == 0;
  }

  // Rows whose first partition lies in the same blocks become neighbours, the longest prefix to share first.
  void bring_sharers_together() {
    if (batch_->rows < 2) return;
    const size_t bytes = blocks_of(1) * sizeof(int32_t);
    std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
      const bool a_shares = shareable(a) > 0, b_shares = shareable(b) > 0;
      if (a_shares != b_shares) return a_shares;
      const int difference = a_shares ? std::memcmp(blocks(a), blocks(b), bytes) : 0;
      return difference != 0 ? difference < 0 : a < b;
    });
  }

  // Add the tasks of the row at `at` of the order and of those that share a prefix with it; return where they end.
  size_t add_rows(size_t at) {
    const int32_t leader = order_[at];
    int32_t shared = shareable(leader);
    size_t end = at + 1;
    if (shared > 0)
      while (end < order_.size() && shareable(order_[end]) > 0 && share(leader, order_[end], 1)) ++end;
    if (end == at + 1) {
      add_row(leader, Records{}, 0);
      return end;
    }
    for (size_t i = at + 1; i < end; ++i) {
      shared = std::min(shared, shareable(order_[i]));
      while (!share(leader, order_[i], shared)) --shared;
    }
    const int32_t first = static_cast<int32_t>(tokens.size());
    int32_t count = 0;
    for (size_t i = at; i < end; ++i) count += query_len(order_[i]);
    const Records kept = reserve(first, count, shared);
    for (size_t i = at; i < end; ++i) add_row(order_[i], kept, shared);
    for (int32_t partition = 0; partition < shared; ++partition)
      deal_out(count, [&](int32_t begin, int32_t size) {
        prefixes.push_back(Task{leader, first + begin, size, partition, partition + 1, 0, Records{}, kept, -1,
                                price(kPartition, size)});
      });
    return end;
  }

  // Add the tasks of one row, whose first `shared` partitions others work out.
  void add_row(int32_t row, const Records& kept, int32_t shared) {
    const int32_t first = static_cast<int32_t>(tokens.size()), count = query_len(row);
    const int32_t before = batch_->context_lens[row] - count;
    for (int32_t i = 0; i < count; ++i) {
      tokens.push_back(batch_->query_start[row] + i);
      seen.push_back(before + i + 1);
    }
    deal_out(count, [&](int32_t begin, int32_t size) {
      const int32_t last = seen[static_cast<size_t>(first + begin + size - 1)];
      const int32_t end = (last + kPartition - 1) / kPartition;
      tasks.push_back(Task{row, first + begin, size, shared, end, shared, kept, Records{}, -1,
                           price(last - shared * kPartition, size)});
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

  int64_t price(int64_t context, int64_t query_tokens) const {
    return std::max<int64_t>(context, 16) * (query_tokens * group_ + kTurningRows);
  }

  Records reserve(int32_t first, int32_t count, int32_t partitions) {
    const Records kept{records, first, partitions};
    records += static_cast<int64_t>(count) * partitions;
    return kept;
  }

  // Cut tasks that cost much more than `most` (by one KV head) into pieces of whole partitions.
  void split_long(int64_t most, int64_t num_kv_heads) {
    most = std::max<int64_t>(1, most / num_kv_heads);
    const size_t count = tasks.size();
    for (size_t i = 0; i < count; ++i) {
      const Task whole = tasks[i];
      const int32_t partitions = whole.end - whole.begin;
      const int64_t wanted = std::min<int64_t>(partitions, whole.cost / most);
      if (wanted < 2) continue;
      const int32_t size = static_cast<int32_t>((partitions + wanted - 1) / wanted);
      const Records own = reserve(whole.first, whole.count, partitions);
      const int32_t counter = static_cast<int32_t>(pieces.size());
      pieces.push_back((partitions + size - 1) / size);
      for (int32_t begin = whole.begin; begin < whole.end; begin += size) {
        Task piece = whole;
        piece.begin = begin;
        piece.end = std::min(whole.end, begin + size);
        piece.own = own;
        piece.pieces = counter;
        piece.cost = whole.cost * (piece.end - begin) / partitions;
        if (begin == whole.begin)
          tasks[i] = piece;
        else
          tasks.push_back(piece);
      }
    }
  }
};

}  // namespace attention
}  // namespace octavo
