#include "client/kv/step_stream.h"

#include <utility>

#include "common/kv/step_metadata.h"

namespace ringattn::client {

StepStream::StepStream(const Peer& peer, BearerToken* token, grpc::CompletionQueue* queue) {
  if (token != nullptr) token->AddTo(&context_);
  if (peer.is_worker) {
    context_.AddMetadata(kStepHelloMetadataKey, peer.hello.SerializeAsString());
  }
  // The stub need not outlive the call.
  stream_ = peer.is_worker
                ? v1::KvShardService::NewStub(peer.channel)->PrepareAsyncSteps(&context_, queue)
                : v1::KvCacheService::NewStub(peer.channel)->PrepareAsyncSteps(&context_, queue);
  ++pending_;
  stream_->StartCall(&start_tag_);
  v1::StepRequest request;
  *request.mutable_hello() = peer.hello;
  Send(std::move(request));
}

void StepStream::Send(v1::StepRequest request) {
  requests_.push_back(std::move(request));
  if (started_ && !writing_ && !broken_) Write();
}

v1::StepResponse StepStream::TakeAnswer() {
  v1::StepResponse answer = std::move(answers_.front());
  answers_.pop_front();
  return answer;
}

void StepStream::Handle(void* tag, bool ok) {
  const Tag& event = *static_cast<Tag*>(tag);
  event.stream->OnDone(event.operation, ok);
}

void StepStream::OnDone(Operation operation, bool ok) {
  --pending_;
  switch (operation) {
    case Operation::kStart:
      started_ = true;
      broken_ = !ok;
      if (!ok) return Finish();
      Read();
      return Write();
    case Operation::kWrite:
      writing_ = false;
      requests_.pop_front();
      broken_ |= !ok;  // the read that is pending ends the stream
      if (!broken_ && !requests_.empty()) Write();
      return;
    case Operation::kRead:
      if (!ok) {
        broken_ = true;
        return Finish();
      }
      answers_.push_back(std::move(response_));
      response_.Clear();
      return Read();
    case Operation::kFinish:
      end_ = status_;
      return;
  }
}

void StepStream::Write() {
  writing_ = true;
  ++pending_;
  // A description waits for the call that follows, so both travel together.
  grpc::WriteOptions options;
  if (requests_.size() > 1) options.set_buffer_hint();
  stream_->Write(requests_.front(), options, &write_tag_);
}

void StepStream::Read() {
  ++pending_;
  stream_->Read(&response_, &read_tag_);
}

void StepStream::Finish() {
  if (std::exchange(finishing_, true)) return;
  ++pending_;
  stream_->Finish(&status_, &finish_tag_);
}

}  // namespace ringattn::client
