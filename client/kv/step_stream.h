// StepStream: one Steps stream, to the coordinator (relay) or to a worker (direct). The thread that
// uses the cache drives it through a completion queue, so an answer needs no change of threads.
#ifndef RINGATTN_CLIENT_KV_STEP_STREAM_H_
#define RINGATTN_CLIENT_KV_STEP_STREAM_H_

#include <deque>
#include <memory>
#include <optional>
#include <string>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/support/async_stream.h>

#include "common/security/bearer_token.h"
#include "ringattn/v1/kv_cache.grpc.pb.h"

namespace ringattn::client {

// Not thread safe.
class StepStream {
 public:
  // The other end of a stream.
  struct Peer {
    std::shared_ptr<grpc::Channel> channel;
    std::string name;        // for messages: "the coordinator", or the worker
    bool is_worker = false;  // KvShardService
    v1::StepHello hello;
  };

  // Starts the stream. `token`: sent with the call, null: none. The queue outlives the stream.
  StepStream(const Peer& peer, BearerToken* token, grpc::CompletionQueue* queue);

  StepStream(const StepStream&) = delete;
  StepStream& operator=(const StepStream&) = delete;

  // Sends after all earlier requests.
  void Send(v1::StepRequest request);
  bool has_answer() const { return !answers_.empty(); }
  v1::StepResponse TakeAnswer();
  void Cancel() { context_.TryCancel(); }

  // Set once the stream has ended and all answers were received.
  const std::optional<grpc::Status>& end() const { return end_; }
  // Operations on the queue. The stream may be destroyed if there are none.
  int pending() const { return pending_; }

  // Handles an event of the queue that carries `tag`.
  static void Handle(void* tag, bool ok);

 private:
  enum class Operation { kStart, kRead, kWrite, kFinish };
  struct Tag {
    StepStream* stream;
    Operation operation;
  };

  void OnDone(Operation operation, bool ok);
  void Write();
  void Read();
  void Finish();

  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::StepRequest, v1::StepResponse>> stream_;
  Tag start_tag_{this, Operation::kStart};
  Tag read_tag_{this, Operation::kRead};
  Tag write_tag_{this, Operation::kWrite};
  Tag finish_tag_{this, Operation::kFinish};

  std::deque<v1::StepRequest> requests_;  // the first is being written if writing_
  std::deque<v1::StepResponse> answers_;
  v1::StepResponse response_;
  grpc::Status status_;
  std::optional<grpc::Status> end_;
  int pending_ = 0;
  bool started_ = false;
  bool writing_ = false;
  bool broken_ = false;  // nothing more is written
  bool finishing_ = false;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_KV_STEP_STREAM_H_
