// RunDeferred: runs work on one of gRPC's threads instead of the caller's.
#ifndef RINGATTN_SERVER_EDGE_DATA_RUN_SOON_H_
#define RINGATTN_SERVER_EDGE_DATA_RUN_SOON_H_

#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include <grpcpp/alarm.h>

namespace ringattn::server {

// Schedules `work` to run once on one of gRPC's threads, never inside this call. Thread safe. Uses
// gRPC's own pool, through an alarm that is due immediately.
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
