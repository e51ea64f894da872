// CancelLatch remembers a cancellation.
#ifndef RINGATTN_COMMON_SCHEDULE_ROUTE_CANCEL_LATCH_H_
#define RINGATTN_COMMON_SCHEDULE_ROUTE_CANCEL_LATCH_H_

#include <functional>
#include <utility>

namespace ringattn {

// Polls a callback until it returns true, and never again after that. Not thread safe.
class CancelLatch {
 public:
  explicit CancelLatch(std::function<bool()> callback) : callback_(std::move(callback)) {}

  bool Poll() {
    if (!cancelled_ && callback_) cancelled_ = callback_();
    return cancelled_;
  }
  bool cancelled() const { return cancelled_; }

 private:
  const std::function<bool()> callback_;  // empty: never cancelled
  bool cancelled_ = false;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_ROUTE_CANCEL_LATCH_H_
