// Cluster: workers of one process around a fake coordinator, and the calls that a
// coordinator makes, one line each.
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

// One request, cut for `world_size` ranks.
struct TestRequest {
  AttentionSpec spec;
  ShardPlan plan;
  TensorMap inputs;    // whole tensors; of a packed one its parts
  TensorMap expected;  // what RunInProcess makes of them

  bool parts_apart = false;  // in the chunks of a packed input

  // Causal fp32 forward over `tokens` tokens with fixed pseudo-random inputs.
  static TestRequest Make(int64_t tokens, int world_size, Packing packing = Packing::kNone);
  ShardMap MapOf(TensorId id) const;
};

// An Exchange stream through the ordinary generated stub.
class TestExchange {
 public:
  using Metadata = std::vector<std::pair<std::string, std::string>>;

  TestExchange(const std::string& data_address, const std::string& secret = kTestSecret);

  // The stream's status if it ended before ShardOpened.
  absl::Status Open(const std::string& operation_id, uint64_t generation,
                    uint32_t max_chunk_bytes = 0);
  // Likewise, of a client.
  absl::Status OpenPart(const std::string& token, uint32_t part, uint32_t parts,
                        uint32_t max_chunk_bytes = 0);
  // Likewise, with this beside the secret instead of an OpenShard.
  absl::Status OpenWith(const Metadata& metadata);
  bool Send(const v1::ExchangeRequest& request) { return stream_->Write(request); }
  bool SendChunk(TensorId id, uint64_t offset, const std::string& data,
                 std::optional<uint32_t> crc32c = std::nullopt);
  // All inputs of `rank`, in pieces of `piece_bytes`, with their crc.
  bool Upload(const TestRequest& request, int rank, int64_t piece_bytes);
  // Reads to the stream's end and puts the chunks into whole tensors.
  absl::Status Download(const TestRequest& request, int rank, TensorMap* outputs);
  absl::Status Finish();
  void Cancel() { context_.TryCancel(); }

 private:
  // Starts the call; its status if it ended before ShardOpened.
  absl::Status Begin();

  grpc::ClientContext context_;
  std::unique_ptr<v1::ShardService::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ExchangeRequest, v1::ExchangeResponse>> stream_;
};

class Cluster {
 public:
  explicit Cluster(int worker_count, WorkerOptions base = {});

  int size() const { return static_cast<int>(workers_.size()); }
  static std::string Name(int rank);
  FakeCoordinator& coordinator() { return *coordinator_; }
  ScalarDevice& device(int rank) { return *devices_[rank]; }
  const Worker& worker(int rank) const { return *workers_[rank]; }
  Worker& worker(int rank) { return *workers_[rank]; }
  // How often the rank's rings were told that a group may come.
  int woken(int rank) const { return transports_[rank]->count(); }
  const std::vector<std::string>& stuck() const { return stuck_; }

  // Each of these fails the test if an answer does not come.
  void WaitForAll();
  std::vector<v1::Committed> Form(uint64_t generation);
  void TearDown(uint64_t generation);
  // `token`: of clients' streams, followed by the rank; empty: none.
  void Reserve(const TestRequest& request, const std::string& id, uint64_t generation,
               const std::string& token = "");
  void SendRun(const std::string& id, uint64_t generation);
  void SendCancel(const std::string& id, uint64_t generation);
  void Release(const std::string& id, uint64_t generation);
  std::vector<v1::Finished> AwaitFinished();
  std::vector<std::unique_ptr<TestExchange>> UploadAll(const TestRequest& request,
                                                       const std::string& id, uint64_t generation);
  // The whole way, result compared with the expected one.
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

// Waits until every worker's heartbeat says that nothing is reserved; fails the test if one does
// not.
void ExpectAllFree(Cluster& cluster);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_TESTING_CLUSTER_H_
