// For every sequence of messages on a writer's stream, the worker stays inside its memory, answers
// each message or ends the stream with a reason, and keeps the rules of the step log. An input is a
// byte that chooses the cache, and frames: a byte of flags, a length of two bytes (little-endian),
// and a StepRequest.

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include "absl/synchronization/notification.h"
#include "common/kv/shard_cut.h"
#include "common/kv/step.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/kv/kv_shard.h"
#include "worker/kv/kv_store.h"
#include "worker/kv/step_session.h"

namespace {

namespace v1 = ringattn::v1;
using ringattn::worker::KvStore;
using ringattn::worker::StepKernels;
using ringattn::worker::StepSession;

constexpr char kId[] = "a cache";
constexpr char kToken[] = "a token of thirty-two bytes, yes.";
constexpr int kMaxFrames = 64;
constexpr int64_t kBlocks = 12;

// Flags of a frame.
constexpr uint8_t kFit = 1;     // gives a call the begun step's number and tensors of its sizes
constexpr uint8_t kReopen = 2;  // another writer opens the cache first, and its log is settled
constexpr uint8_t kClaim = 4;   // ... and that writer claims the begun step

void Require(bool condition) {
  if (!condition) std::abort();
}

v1::KvLayerGroup* AddGroup(v1::KvCacheSpec* spec, uint32_t layer, uint32_t heads,
                           uint32_t kv_heads) {
  v1::KvLayerGroup* group = spec->add_groups();
  group->add_layers(layer);
  group->set_num_heads(heads);
  group->set_num_kv_heads(kv_heads);
  group->set_head_dim(4);
  return group;
}

// The caches that an input can choose from.
v1::KvReserve MakeReserve(int choice) {
  v1::KvReserve reserve;
  reserve.set_cache_id(kId);
  v1::KvCacheSpec* spec = reserve.mutable_spec();
  spec->set_dtype(v1::DATA_TYPE_FLOAT32);
  spec->set_block_tokens(16);
  spec->set_blocks(kBlocks);
  v1::KvPlacement* placement = reserve.mutable_placement();
  placement->set_head_parts(1);
  placement->set_position_parts(1);
  AddGroup(spec, 0, 2, 2)->add_layers(1);
  switch (choice) {
    case 1:  // a window, and groups of different widths
      AddGroup(spec, 7, 4, 1)->set_window_left(20);
      spec->mutable_groups(1)->set_softcap(3);
      break;
    case 2:
      spec->set_numbering(v1::KV_NUMBERING_BLOCKS);
      AddGroup(spec, 7, 2, 2)->set_window_left(5);
      break;
    case 3:  // entries of the second position part
      placement->set_position_parts(2);
      reserve.set_rank(1);
      break;
    case 4:  // the second head's part, in half precision, with sinks
      spec->set_dtype(v1::DATA_TYPE_FLOAT16);
      spec->mutable_groups(0)->set_sinks(std::string(2 * 2 * sizeof(float), '\0'));
      placement->set_head_parts(2);
      reserve.set_rank(1);
      break;
    default:
      break;
  }
  const uint32_t ranks = placement->head_parts() * placement->position_parts();
  for (uint32_t i = 0; i < ranks; ++i) placement->add_members(std::string(1, 'a' + i));
  return reserve;
}

class Stream final : public ringattn::worker::KvStream {
 public:
  void End(const absl::Status&) override {}
};

// A worker with one cache, and the stream of its writer.
class Worker {
 public:
  Worker()
      : device_(1, 0),
        budget_(1 << 24),
        store_({.max_bytes = 1 << 24, .tick_interval = absl::ZeroDuration()}, &device_, &budget_,
               [this](const v1::JoinRequest& message) { OnMessage(message); }) {}

  void Begin(int choice) {
    reserve_ = MakeReserve(choice);
    spec_ = *ringattn::ParseKvCacheSpec(reserve_.spec(), ringattn::Limits());
    placement_ = {static_cast<int>(reserve_.placement().head_parts()),
                  static_cast<int>(reserve_.placement().position_parts())};
    absl::Notification reserved;
    reserved_ = &reserved;
    store_.Reserve(reserve_);
    reserved.WaitForNotification();
    epoch_ = begun_ = committed_ = 0;
    Open(false);
  }
  void End() {
    v1::KvFree free;
    free.add_cache_ids(kId);
    store_.Free(free);
    Require(budget_.taken_bytes() == 0 && store_.count() == 0);
  }

  void Handle(uint8_t flags, v1::StepRequest request) {
    if (flags & kReopen) Open((flags & kClaim) != 0);
    if (session_ == nullptr) Attach();
    if (request.has_call() && (flags & kFit)) Fit(request.mutable_call());
    v1::StepResponse response;
    absl::Status status;
    store_.engine()->RunHere([&](StepKernels* kernels) {
      status = session_->Execute(request, stream_, kernels, &response);
    });
    if (!status.ok()) {
      Require(status.code() != absl::StatusCode::kUnknown && !status.message().empty());
      session_.reset();  // the stream ends; the writer connects again
    } else {
      CheckAnswer(request, response);
    }
    CheckLog();
  }

 private:
  void OnMessage(const v1::JoinRequest& message) {
    if (message.has_kv_reserved()) {
      Require(message.kv_reserved().ok());
      reserved_->Notify();
    }
    if (message.has_kv_opened()) complete_ = message.kv_opened().complete_step();
    if (message.has_kv_settled()) Require(message.kv_settled().ok());
  }

  void Open(bool claim) {
    v1::KvOpen open;
    open.set_cache_id(kId);
    open.set_epoch(++epoch_);
    open.set_token(kToken);
    store_.Open(open);
    store_.engine()->RunHere([](StepKernels*) {});
    v1::KvSettle settle;
    settle.set_cache_id(kId);
    settle.set_epoch(epoch_);
    settle.set_step(claim ? complete_ : committed_);
    store_.Settle(settle);
    store_.engine()->RunHere([](StepKernels*) {});
    committed_ = settle.step();
    begun_ = 0;
    Attach();
  }

  void Attach() {
    session_ = std::make_unique<StepSession>(&store_, /*with_token=*/true, &hooks_);
    refused_ = 0;
    v1::StepRequest request;
    request.mutable_hello()->set_cache_id(kId);
    request.mutable_hello()->set_epoch(epoch_);
    request.mutable_hello()->set_token(kToken);
    request.mutable_hello()->set_rank(reserve_.rank());
    v1::StepResponse response;
    store_.engine()->RunHere([&](StepKernels* kernels) {
      Require(session_->Execute(request, stream_, kernels, &response).ok());
    });
    Require(response.opened().next_step() == committed_ + 1);
  }

  // The begun step and the sizes of its tensors on this rank.
  void Fit(v1::LayerCall* call) {
    const auto location = ringattn::FindLayer(spec_, call->layer());
    if (begun_ == 0 || !location.has_value()) return;
    call->set_step(begun_);
    const ringattn::KvCallBytes bytes =
        CallBytesOfRank(spec_, placement_, step_, location->group, call->output(),
                        static_cast<int>(reserve_.rank()));
    const bool reads = call->k().empty() && call->v().empty();
    call->mutable_q()->resize(bytes.q, 'q');
    if (reads) return;
    call->mutable_k()->resize(bytes.k, 'k');
    call->mutable_v()->resize(bytes.v, 'v');
  }

  void CheckAnswer(const v1::StepRequest& request, const v1::StepResponse& response) {
    switch (response.message_case()) {
      case v1::StepResponse::kAccepted:
        Require(request.has_begin() && response.accepted().step() == request.begin().step());
        Require(response.accepted().blocks_free() <= kBlocks);
        if (begun_ != 0 && begun_ != request.begin().step()) committed_ = begun_;
        begun_ = request.begin().step();
        step_ = *ringattn::ParseStep(request.begin(), ringattn::Limits());
        refused_ = 0;
        break;
      case v1::StepResponse::kRefused:
        Require(request.has_begin() && response.refused().rows_size() > 0);
        if (begun_ != 0) committed_ = begun_;
        begun_ = 0;
        refused_ = request.begin().step();
        break;
      case v1::StepResponse::kResult: {
        Require(request.has_call() && request.call().step() == begun_);
        const auto location = ringattn::FindLayer(spec_, request.call().layer());
        const ringattn::KvCallBytes bytes =
            CallBytesOfRank(spec_, placement_, step_, location->group, request.call().output(),
                            static_cast<int>(reserve_.rank()));
        Require(static_cast<int64_t>(response.result().out().size()) == bytes.out);
        Require(static_cast<int64_t>(response.result().lse().size()) == bytes.lse);
        break;
      }
      case v1::StepResponse::kCommitted:
        Require(request.has_commit());
        committed_ = request.commit().step();
        begun_ = 0;
        break;
      case v1::StepResponse::MESSAGE_NOT_SET:  // a call of a refused step
        Require(request.has_call() && refused_ != 0 && request.call().step() == refused_);
        break;
      default:
        Require(false);
    }
  }

  void CheckLog() {
    const auto cache = store_.Attach(MakeHello(), /*with_token=*/true, stream_);
    Require(cache.ok());
    store_.engine()->RunHere([&](StepKernels*) {
      const ringattn::KvStepLog& log = (*cache)->shard()->log();
      const ringattn::KvBlockMap& blocks = log.blocks();
      // A message that failed may have committed the step before.
      if (begun_ != 0 && log.committed() == begun_) {
        committed_ = begun_;
        begun_ = 0;
      }
      Require(log.committed() == committed_);
      Require(log.begun_step().has_value() == (begun_ != 0));
      Require(blocks.blocks_free() >= 0 && blocks.blocks_used() >= 0);
      Require(blocks.blocks_free() + blocks.blocks_used() == kBlocks);
    });
  }

  v1::StepHello MakeHello() const {
    v1::StepHello hello;
    hello.set_cache_id(kId);
    hello.set_epoch(epoch_);
    hello.set_token(kToken);
    hello.set_rank(reserve_.rank());
    return hello;
  }

  ringattn::worker::CpuDevice device_;
  ringattn::worker::MemoryBudget budget_;
  ringattn::worker::StepHooks hooks_;
  KvStore store_;
  std::shared_ptr<Stream> stream_ = std::make_shared<Stream>();
  absl::Notification* reserved_ = nullptr;

  v1::KvReserve reserve_;
  ringattn::KvCacheSpec spec_;
  ringattn::KvPlacement placement_;
  std::unique_ptr<StepSession> session_;  // null after an error
  uint64_t epoch_ = 0;
  uint64_t committed_ = 0;
  uint64_t complete_ = 0;  // of the last KvOpened
  uint64_t begun_ = 0;     // 0: none
  uint64_t refused_ = 0;   // 0: the last StepBegin of the stream was not refused
  ringattn::KvStep step_;  // the begun one
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  static auto* const worker = new Worker;
  worker->Begin(data[0] % 5);
  size_t at = 1;
  for (int i = 0; i < kMaxFrames && at + 3 <= size; ++i) {
    const uint8_t flags = data[at];
    const size_t length = data[at + 1] | size_t{data[at + 2]} << 8;
    at += 3;
    if (length > size - at) break;
    v1::StepRequest request;
    if (!request.ParseFromArray(data + at, static_cast<int>(length))) break;
    at += length;
    worker->Handle(flags, std::move(request));
  }
  worker->End();
  return 0;
}
