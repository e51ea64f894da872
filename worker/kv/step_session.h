// StepSession: executes the messages of one writer's stream, independently of the transport that
// carries them.
//
// Tests: step_session_test.cc, tests/fuzz/step_stream_fuzz.cc
#ifndef RINGATTN_WORKER_KV_STEP_SESSION_H_
#define RINGATTN_WORKER_KV_STEP_SESSION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ringattn/v1/kv_cache.pb.h"
#include "worker/device/device.h"
#include "worker/kv/kv_store.h"

namespace ringattn::worker {

// For metrics. Called on any thread; must not block.
struct StepHooks {
  std::function<void()> on_step = [] {};                                // a step was begun
  std::function<void(absl::Duration)> on_call = [](absl::Duration) {};  // a layer call's time
  // A step or a stream was refused; the reason as in ErrorInfo or RowRefusal.
  std::function<void(const std::string& reason)> on_refused = [](const std::string&) {};
  std::function<void(int64_t)> on_received_bytes = [](int64_t) {};
  std::function<void(int64_t)> on_sent_bytes = [](int64_t) {};
  // The same for calls in rings, in place of the two above.
  std::function<void(int64_t)> on_ring_received_bytes = [](int64_t) {};
  std::function<void(int64_t)> on_ring_sent_bytes = [](int64_t) {};
};

// "BAD_CALL", "KV_FENCED", ...: KvErrorReason; OVER_LIMIT and INVALID_REQUEST where there is none.
std::string StepErrorReason(const absl::Status& status);

// Not thread safe: Execute runs on the engine's thread.
class StepSession {
 public:
  // `with_token`: StepHello must carry the cache's token. `store` and `hooks` must outlive this.
  StepSession(KvStore* store, bool with_token, const StepHooks* hooks);

  // Executes `request` and sets `response`. A call of a step that was refused on this stream gets
  // no response: the client sent it before it knew. `stream` is ended when the cache ends or
  // another writer opens it. After an error, `response` is undefined and the stream must end.
  absl::Status Execute(const v1::StepRequest& request, const std::shared_ptr<KvStream>& stream,
                       StepKernels* kernels, v1::StepResponse* response);

 private:
  absl::Status Dispatch(const v1::StepRequest& request, const std::shared_ptr<KvStream>& stream,
                        StepKernels* kernels, v1::StepResponse* response);
  absl::Status Hello(const v1::StepHello& hello, const std::shared_ptr<KvStream>& stream,
                     v1::StepResponse* response);
  absl::Status Begin(const v1::StepBegin& begin, v1::StepResponse* response);
  absl::Status Call(const v1::LayerCall& call, StepKernels* kernels, v1::StepResponse* response);

  KvStore* const store_;
  const bool with_token_;
  const StepHooks* const hooks_;
  std::shared_ptr<KvCache> cache_;  // null before hello
  uint64_t epoch_ = 0;
  std::optional<uint64_t> refused_step_;  // of the last StepBegin, if it was refused
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KV_STEP_SESSION_H_
