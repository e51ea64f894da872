// RunDeferred: work on one of gRPC's threads instead of the caller's.
#ifndef RINGATTN_SERVER_EDGE_DATA_RUN_SOON_H_
#define RINGATTN_SERVER_EDGE_DATA_RUN_SOON_H_

#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include <grpcpp/alarm.h>

namespace ringattn::server {

// Runs `work` once, soon, on one of gRPC's threads, not inside this call. Thread safe.
// (gRPC's own pool serves: an alarm that is due at once is handed to it.)
inline void RunDeferred(std::function<void()> work) {
  struct Job {
    grpc::Alarm alarm;
    std::function<void()> work;
  };
  Job* job = new Job{{}, std::move(work)};
  job->alarm.Set(std::chrono::system_clock::now(), [job](bool) {
    const std::unique_ptr<Job> owned(job);
    owned->work();
  });
}

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_DATA_RUN_SOON_H_
