// TupleNumbers numbers different tuples of integers, all of one width.
#ifndef RINGATTN_COMMON_SCHEDULE_ROUTE_TUPLE_NUMBERS_H_
#define RINGATTN_COMMON_SCHEDULE_ROUTE_TUPLE_NUMBERS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "absl/types/span.h"

namespace ringattn {

// Stores all tuples in one vector: planning looks up several for every step of every rank. Not
// thread safe.
class TupleNumbers {
 public:
  explicit TupleNumbers(int width) : width_(width), known_(64, Hash{this}, Equal{this}) {}
  TupleNumbers(const TupleNumbers&) = delete;
  TupleNumbers& operator=(const TupleNumbers&) = delete;

  int32_t size() const { return static_cast<int32_t>(known_.size()); }

  // Returns whether the number is that of the tuple.
  //   number  below size(), or kNone
  bool Is(int32_t number, const int32_t* tuple) const {
    return number != kNone && TupleOf(number) == Tuple(tuple, width_);
  }

  // Returns the tuple's number: the next free one if the tuple is new.
  int32_t NumberOf(const int32_t* tuple) {
    const auto found = known_.find(Tuple(tuple, width_));
    if (found != known_.end()) return *found;
    const int32_t number = size();
    values_.insert(values_.end(), tuple, tuple + width_);
    known_.insert(number);
    return number;
  }

  static constexpr int32_t kNone = -1;

 private:
  using Tuple = absl::Span<const int32_t>;

  Tuple TupleOf(int32_t number) const {
    return Tuple(values_).subspan(static_cast<size_t>(number) * width_, width_);
  }
  Tuple TupleOf(Tuple tuple) const { return tuple; }

  // Numbers have the hashes of their tuples, so that tuples are found without a copy.
  struct Hash {
    using is_transparent = void;
    template <typename Key>
    size_t operator()(const Key& key) const {
      return absl::Hash<Tuple>()(numbers->TupleOf(key));
    }
    const TupleNumbers* numbers;
  };
  struct Equal {
    using is_transparent = void;
    template <typename A, typename B>
    bool operator()(const A& a, const B& b) const {
      return numbers->TupleOf(a) == numbers->TupleOf(b);
    }
    const TupleNumbers* numbers;
  };

  const int width_;
  std::vector<int32_t> values_;  // by number
  absl::flat_hash_set<int32_t, Hash, Equal> known_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_ROUTE_TUPLE_NUMBERS_H_
