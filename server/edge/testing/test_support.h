// Support for tests of the edge: a whole server in this process, and workers that compute nothing
// but speak both protocols. A fake worker checks every byte it receives and generates every byte it
// sends from the byte's position in the global tensor, so misplaced bytes are detected on both
// sides.
#ifndef RINGATTN_SERVER_EDGE_TESTING_TEST_SUPPORT_H_
#define RINGATTN_SERVER_EDGE_TESTING_TEST_SUPPORT_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/attention/attention_spec.h"
#include "ringattn/v1/attention.grpc.pb.h"
#include "ringattn/v1/cluster.grpc.pb.h"
#include "ringattn/v1/shard.grpc.pb.h"
#include "ringattn/v1/worker_control.grpc.pb.h"
#include "server/edge/server.h"

namespace ringattn::server {

inline constexpr char kTestSecret[] = "0123456789abcdef";

// Returns the byte at `offset` of a tensor, for inputs and outputs.
inline char PatternByte(int tensor, uint64_t offset) {
  const uint64_t mixed = (offset + 31 * static_cast<uint64_t>(tensor)) * 0x9e3779b97f4a7c15u;
  return static_cast<char>(mixed >> 56);
}
std::string Pattern(int tensor, uint64_t offset, uint64_t bytes);

// A worker without computation. Reports of requests with a timeline have 500 KB. Thread safe.
class FakeWorker final : public v1::ShardService::Service {
 public:
  // Joins immediately.
  FakeWorker(const std::string& name, const std::string& control_address);
  ~FakeWorker() override;

  // While closed, uploads are not read any further.
  void SetUploadGate(bool open) ABSL_LOCKS_EXCLUDED(mutex_);
  // While closed, no output is sent.
  void SetSendGate(bool open) ABSL_LOCKS_EXCLUDED(mutex_);
  // While closed, runs do not finish.
  void SetRunGate(bool open) ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t received_bytes() const { return received_bytes_; }
  int64_t sent_bytes() const { return sent_bytes_; }
  int64_t wrong_bytes() const { return wrong_bytes_; }
  int reserves() const { return reserves_; }
  int held_operations() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns the residuals that it was ordered to drop.
  int dropped_residuals() const { return dropped_residuals_; }

  grpc::Status Exchange(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::ExchangeResponse, v1::ExchangeRequest>* stream) override;

 private:
  struct Operation {
    v1::Reserve reserve;
    int rank = 0;
    std::vector<TensorId> inputs, outputs;
    int64_t missing_bytes = 0;
    bool run = false;
    bool released = false;
  };
  // A chunk's bytes and their position: [local offset, +size) of the rank's tensor.
  void ForEachByte(const Operation& operation, int tensor, uint64_t offset, uint64_t bytes,
                   const std::function<void(uint64_t index, uint64_t global)>& visit) const;

  void Control();
  void Answer(const v1::JoinResponse& message);
  void Reserve(const v1::Reserve& reserve);
  void Send(const v1::JoinRequest& message);
  void Beat();

  const std::string name_;
  std::unique_ptr<grpc::Server> server_;
  std::string data_address_;
  std::unique_ptr<v1::WorkerControlService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::JoinRequest, v1::JoinResponse>> control_;
  absl::Mutex write_mutex_;

  mutable absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<Operation>> operations_ ABSL_GUARDED_BY(mutex_);
  bool upload_open_ ABSL_GUARDED_BY(mutex_) = true;
  bool send_open_ ABSL_GUARDED_BY(mutex_) = true;
  bool run_open_ ABSL_GUARDED_BY(mutex_) = true;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  int prepared_rank_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<int64_t> received_bytes_ = 0;
  std::atomic<int64_t> sent_bytes_ = 0;
  std::atomic<int64_t> wrong_bytes_ = 0;
  std::atomic<int> reserves_ = 0;
  std::atomic<int> dropped_residuals_ = 0;
  std::thread control_thread_;
  std::thread heartbeat_thread_;
};

// A ready server with `workers` fake workers.
struct TestCluster {
  explicit TestCluster(int workers, const std::function<void(ServerOptions*)>& change = nullptr);
  ~TestCluster();

  v1::Topology topology() const;
  // Waits until no worker holds memory; returns false after 10 s.
  bool WaitIdle() const;

  std::unique_ptr<Server> server;
  std::vector<std::unique_ptr<FakeWorker>> workers;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::AttentionService::Stub> attention;
  std::unique_ptr<v1::ClusterService::Stub> cluster;
};

// Polls the condition; returns false after `timeout`.
bool WaitUntil(const std::function<bool()>& condition, absl::Duration timeout = absl::Seconds(10));

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_TESTING_TEST_SUPPORT_H_
