// Cluster: the workers of one process, a fake coordinator, and one-line helpers for the messages
// that a coordinator sends.
#ifndef RINGATTN_WORKER_TESTING_CLUSTER_H_
#define RINGATTN_WORKER_TESTING_CLUSTER_H_

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "absl/status/status.h"
#include "common/attention/attention_spec.h"
#include "ringattn/v1/shard.grpc.pb.h"
#include "worker/executor/run_in_process.h"
#include "worker/service/worker.h"
#include "worker/testing/fake_coordinator.h"
#include "worker/testing/scalar_device.h"
#include "worker/testing/woken_links.h"

namespace ringattn::worker {

inline constexpr char kTestSecret[] = "a secret";

// One request, sharded for `world_size` ranks.
struct TestRequest {
  AttentionSpec spec;
  ShardPlan plan;
  TensorMap inputs;    // whole tensors; a packed tensor as its parts
  TensorMap expected;  // the result of RunInProcess

  bool parts_apart = false;  // sends a packed input as separate parts

  // Makes a causal fp32 forward over `tokens` tokens with pseudo-random inputs that depend on
  // `seed`.
  static TestRequest Make(int64_t tokens, int world_size, Packing packing = Packing::kNone,
                          uint32_t seed = 0);
  ShardMap MapOf(TensorId id) const;
  // Returns the tensor as a client sends it: a packed tensor has the parts of each token in
  // sequence.
  std::string ClientTensor(TensorId id) const;
};

// An Exchange stream that uses the generated stub.
class TestExchange {
 public:
  using Metadata = std::vector<std::pair<std::string, std::string>>;

  TestExchange(const std::string& data_address, const std::string& secret = kTestSecret);

  // Opens a stream as the coordinator. Returns the stream's status if it ended before ShardOpened.
  absl::Status Open(const std::string& operation_id, uint64_t generation,
                    uint32_t max_chunk_bytes = 0);
  // Opens a direct stream as a client.
  absl::Status OpenPart(const std::string& token, uint32_t part, uint32_t parts,
                        uint32_t max_chunk_bytes = 0);
  // Opens a stream with this metadata instead of an OpenShard, in addition to the secret.
  absl::Status OpenWith(const Metadata& metadata);
  bool Send(const v1::ExchangeRequest& request) { return stream_->Write(request); }
  bool SendChunk(TensorId id, uint64_t offset, const std::string& data,
                 std::optional<uint32_t> crc32c = std::nullopt);
  // Sends all inputs of `rank` in chunks of `piece_bytes`, with their crc.
  bool Upload(const TestRequest& request, int rank, int64_t piece_bytes);
  // Reads until the stream ends and assembles the chunks into whole tensors.
  absl::Status Download(const TestRequest& request, int rank, TensorMap* outputs);
  absl::Status Finish();
  void Cancel() { context_.TryCancel(); }

 private:
  // Starts the call. Returns its status if it ended before ShardOpened.
  absl::Status Begin();

  grpc::ClientContext context_;
  std::unique_ptr<v1::ShardService::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ExchangeRequest, v1::ExchangeResponse>> stream_;
};

class Cluster {
 public:
  // `base.local_socket_path`: if not empty, the folder of the workers' sockets (LocalSocketPath).
  explicit Cluster(int worker_count, WorkerOptions base = {});

  int size() const { return static_cast<int>(workers_.size()); }
  static std::string Name(int rank);
  FakeCoordinator& coordinator() { return *coordinator_; }
  ScalarDevice& device(int rank) { return *devices_[rank]; }
  const Worker& worker(int rank) const { return *workers_[rank]; }
  Worker& worker(int rank) { return *workers_[rank]; }
  // Returns how often WakeLinks was called on the rank's rings.
  int woken(int rank) const { return transports_[rank]->count(); }
  const std::vector<std::string>& stuck() const { return stuck_; }

  // Each of these fails the test if a reply does not arrive.
  void WaitForAll();
  std::vector<v1::Committed> Form(uint64_t generation);
  void TearDown(uint64_t generation);
  v1::Reserve MakeReserve(const TestRequest& request, const std::string& id,
                          uint64_t generation) const;
  // `token`: for direct streams, followed by the rank; empty: none.
  void Reserve(const TestRequest& request, const std::string& id, uint64_t generation,
               const std::string& token = "");
  void SendRun(const std::string& id, uint64_t generation);
  void SendCancel(const std::string& id, uint64_t generation);
  void Release(const std::string& id, uint64_t generation);
  std::vector<v1::Finished> AwaitFinished();
  std::vector<std::unique_ptr<TestExchange>> UploadAll(const TestRequest& request,
                                                       const std::string& id, uint64_t generation);
  // Runs a request from Reserve to Release and compares the result with the expected one.
  void RunToTheEnd(const TestRequest& request, const std::string& id, uint64_t generation);

  void VanishCoordinator() { coordinator_->Vanish(); }
  void NewCoordinator();

 private:
  std::unique_ptr<FakeCoordinator> coordinator_;
  std::vector<std::unique_ptr<ScalarDevice>> devices_;
  std::vector<std::unique_ptr<WokenLinks>> transports_;
  std::vector<std::string> stuck_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

// Waits until every worker's heartbeat reports that nothing is reserved. Fails the test after a
// timeout.
void ExpectAllFree(Cluster& cluster);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_TESTING_CLUSTER_H_
