// FakeKvWorker: a worker that serves K/V caches and computes nothing. It keeps real step logs
// (common/kv/step_log) and answers a layer call with its rank's part of q, so that a test can tell
// whether calls are cut and results joined correctly.
#ifndef RINGATTN_SERVER_EDGE_TESTING_FAKE_KV_WORKER_H_
#define RINGATTN_SERVER_EDGE_TESTING_FAKE_KV_WORKER_H_

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/kv/step_log.h"
#include "ringattn/v1/kv_cache.grpc.pb.h"
#include "ringattn/v1/worker_control.grpc.pb.h"

namespace ringattn::server {

// Thread safe.
class FakeKvWorker final : public v1::KvShardService::Service {
 public:
  // Joins immediately.
  FakeKvWorker(const std::string& name, const std::string& control_address, int64_t memory_bytes);
  ~FakeKvWorker() override;

  // Ends the control stream and all steps, as the end of the process does.
  void Die() ABSL_LOCKS_EXCLUDED(mutex_);
  // Adds this number to all checksums of tables.
  void set_checksum_error(uint32_t error) { checksum_error_ = error; }
  int64_t caches() const ABSL_LOCKS_EXCLUDED(mutex_);

  grpc::Status Steps(grpc::ServerContext* context,
                     grpc::ServerReaderWriter<v1::StepResponse, v1::StepRequest>* stream) override;

 private:
  struct Cache {
    v1::KvReserve reserve;
    KvCacheSpec spec;
    KvPlacement placement;
    std::string token;
    std::unique_ptr<KvStepLog> log;
    std::string freed;  // reason; empty: it exists
  };

  void Control();
  void Answer(const v1::JoinResponse& message) ABSL_LOCKS_EXCLUDED(mutex_);
  void Reserve(const v1::KvReserve& reserve, v1::KvReserved* reserved)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  grpc::Status AnswerStep(Cache* cache, uint64_t epoch, const v1::StepRequest& request,
                          v1::StepResponse* response) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Beat();

  const std::string name_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::WorkerControlService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::JoinRequest, v1::JoinResponse>> control_;
  absl::Mutex write_mutex_;
  std::atomic<uint32_t> checksum_error_ = 0;

  mutable absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<Cache>> caches_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread control_thread_;
  std::thread heartbeat_thread_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_TESTING_FAKE_KV_WORKER_H_
