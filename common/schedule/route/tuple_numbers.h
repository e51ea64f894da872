// TupleNumbers numbers different tuples of integers, all of one width.
#ifndef RINGATTN_COMMON_SCHEDULE_ROUTE_TUPLE_NUMBERS_H_
#define RINGATTN_COMMON_SCHEDULE_ROUTE_TUPLE_NUMBERS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ringattn {

// A hash table without a node per entry: planning looks up several tuples for every step of every
// rank. Not thread safe.
class TupleNumbers {
 public:
  explicit TupleNumbers(int width) : width_(width), table_(64, kNone) {}

  int32_t size() const { return static_cast<int32_t>(values_.size() / width_); }

  // Returns whether the number is that of the tuple.
  //   number  below size(), or kNone
  bool Is(int32_t number, const int32_t* tuple) const {
    return number != kNone && std::equal(tuple, tuple + width_, ValuesOf(number));
  }

  // Returns the tuple's number: the next free one if the tuple is new.
  int32_t NumberOf(const int32_t* tuple) {
    size_t place = HashOf(tuple) & (table_.size() - 1);
    for (; table_[place] != kNone; place = (place + 1) & (table_.size() - 1)) {
      if (Is(table_[place], tuple)) return table_[place];
    }
    const int32_t number = size();
    table_[place] = number;
    values_.insert(values_.end(), tuple, tuple + width_);
    if (static_cast<size_t>(size()) * 2 > table_.size()) Grow();
    return number;
  }

  static constexpr int32_t kNone = -1;

 private:
  const int32_t* ValuesOf(int32_t number) const {
    return &values_[static_cast<size_t>(number) * width_];
  }

  size_t HashOf(const int32_t* tuple) const {
    uint64_t hash = 0;
    for (int i = 0; i < width_; ++i) {
      hash = (hash ^ static_cast<uint32_t>(tuple[i])) * uint64_t{0x9E3779B97F4A7C15};
      hash ^= hash >> 32;
    }
    return static_cast<size_t>(hash);
  }

  void Grow() {
    std::vector<int32_t> larger(table_.size() * 2, kNone);
    for (int32_t number = 0; number < size(); ++number) {
      size_t place = HashOf(ValuesOf(number)) & (larger.size() - 1);
      while (larger[place] != kNone) place = (place + 1) & (larger.size() - 1);
      larger[place] = number;
    }
    table_ = std::move(larger);
  }

  const int width_;
  std::vector<int32_t> table_;   // a power of two of places
  std::vector<int32_t> values_;  // by number
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_ROUTE_TUPLE_NUMBERS_H_
