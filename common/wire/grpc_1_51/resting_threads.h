// RestingThreads: few callback threads for small requests, all of them for large tensors.
//
// Each event makes gRPC 1.51 wake another callback thread (callback_threads.h). Small requests
// therefore take less time and processor time with two threads, but relayed tensors need more.
// gRPC cannot change the number, so threads rest in callbacks that wait.
#ifndef RINGATTN_COMMON_WIRE_GRPC_1_51_RESTING_THREADS_H_
#define RINGATTN_COMMON_WIRE_GRPC_1_51_RESTING_THREADS_H_

#include <thread>

#include "absl/time/time.h"

namespace ringattn::wire {

// At most one instance exists in a process. Starts a thread.
class RestingThreads {
 public:
  // `count` of gRPC's callback threads rest while there has been no ManyCallbacks for `linger`. The
  // process has more callback threads than `count`; with 0 or less, nothing happens.
  explicit RestingThreads(int count, absl::Duration linger = absl::Seconds(1));
  // Waits until no thread rests. Does not need callbacks to run.
  ~RestingThreads();

  RestingThreads(const RestingThreads&) = delete;
  RestingThreads& operator=(const RestingThreads&) = delete;

  // Returns how many threads rest now. Thread safe.
  static int resting();

 private:
  void Run();

  const int count_;
  const absl::Duration linger_;
  std::thread thread_;
};

// While one exists, no callback thread rests. Cheap; has no effect without RestingThreads. Thread
// safe.
class ManyCallbacks {
 public:
  ManyCallbacks();
  ~ManyCallbacks();

  ManyCallbacks(const ManyCallbacks&) = delete;
  ManyCallbacks& operator=(const ManyCallbacks&) = delete;
};

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_GRPC_1_51_RESTING_THREADS_H_
