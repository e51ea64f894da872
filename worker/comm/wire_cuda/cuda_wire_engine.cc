#include "worker/comm/wire_cuda/cuda_wire_engine.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "worker/device/cuda/cuda_status.h"

namespace ringattn::worker {
namespace {

// Polling interval for the words that streams write: short compared with the 80 us that a chunk
// takes on a link of 100 Gbit/s, of which several are in flight.
constexpr absl::Duration kPollPause = absl::Microseconds(20);
constexpr absl::Duration kAbortPause = absl::Microseconds(200);
constexpr unsigned long kTimerSlackNs = 1000;
// Larger than any group's number, and valid as the operand of an "at least" wait.
constexpr uint64_t kReleased = uint64_t{1} << 62;
// Each word has a cache line: `reached` and `done` of each lane, and the ends of copies.
constexpr size_t kWordStride = 8, kWords = 2 * kLanes + 2;

bool IsBusy(cudaStream_t stream) {
  return stream != nullptr && cudaStreamQuery(stream) == cudaErrorNotReady;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaWireEngine>> CudaWireEngine::Create(
    CudaWireOptions options, CudaEventPool* events, WireConnector::Joined joined,
    std::shared_ptr<WireCounters> counters) {
  if (absl::Status status = events->UseDevice(); !status.ok()) return status;
  absl::StatusOr<const StreamFlags*> flags = StreamFlags::Load();
  if (!flags.ok()) return flags.status();
  std::unique_ptr<CudaWireEngine> engine(
      new CudaWireEngine(std::move(options), events, *flags, joined.rank));
  if (absl::Status status = engine->Open(); !status.ok()) return status;
  engine->engine_ =
      std::make_unique<WireEngine>(joined.rank, std::move(joined.streams), std::move(counters),
                                   static_cast<WireStaging*>(engine.get()));
  engine->thread_ = std::thread([raw = engine.get()] { raw->Run(); });
  pthread_setname_np(engine->thread_.native_handle(), "ring_copies");
  return engine;
}

CudaWireEngine::CudaWireEngine(CudaWireOptions options, CudaEventPool* events,
                               const StreamFlags* flags, int rank)
    : options_(std::move(options)), events_(events), flags_(flags), rank_(rank) {}

absl::Status CudaWireEngine::Open() {
  void* memory = nullptr;
  constexpr size_t kBytes = kWords * kWordStride * sizeof(uint64_t);
  absl::Status status = CudaStatus(
      cudaHostAlloc(&memory, kBytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
  if (!status.ok()) return status;
  words_ = static_cast<uint64_t*>(memory);
  std::fill_n(words_, kWords * kWordStride, 0);
  void* on_device = nullptr;
  status = CudaStatus(cudaHostGetDevicePointer(&on_device, words_, 0), "cudaHostGetDevicePointer");
  if (!status.ok()) return status;
  const auto word = [&](size_t i) {
    return StreamWord{words_ + i * kWordStride,
                      static_cast<uint64_t*>(on_device) + i * kWordStride};
  };
  for (size_t lane = 0; lane < kLanes; ++lane) {
    lanes_[lane].reached = word(2 * lane);
    lanes_[lane].done = word(2 * lane + 1);
  }
  from_device_ = std::make_unique<CopyLine>(flags_, word(2 * kLanes));
  to_device_ = std::make_unique<CopyLine>(flags_, word(2 * kLanes + 1));
  if (status = from_device_->Open(); !status.ok()) return status;
  if (status = to_device_->Open(); !status.ok()) return status;
  if (status = send_slots_.Open(options_.slots); !status.ok()) return status;
  return receive_slots_.Open(options_.slots);
}

CudaWireEngine::~CudaWireEngine() {
  Abort();
  (void)events_->UseDevice();
  engine_ = nullptr;
  from_device_ = nullptr;
  to_device_ = nullptr;
  if (words_ != nullptr) (void)cudaFreeHost(words_);
}

absl::StatusOr<size_t> CudaWireEngine::LaneOf(cudaStream_t stream) {
  absl::MutexLock lock(&mutex_);
  if (interrupted_) return absl::UnavailableError("the communicator was aborted");
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (lanes_[lane].stream == nullptr) lanes_[lane].stream = stream;
    if (lanes_[lane].stream == stream) return lane;
  }
  return absl::InternalError(absl::StrCat("groups come on more than ", kLanes, " streams"));
}

absl::Status CudaWireEngine::Enqueue(const std::vector<PeerTransfer>& group, cudaStream_t stream,
                                     const std::shared_ptr<GroupFailure>& failure) {
  for (const PeerTransfer& transfer : group) {
    if (engine_->HasPeer(transfer.peer)) continue;
    return absl::InternalError(absl::StrCat("rank ", transfer.peer, " is not a peer of this ring"));
  }
  const absl::StatusOr<size_t> index = LaneOf(stream);
  if (!index.ok()) return index.status();
  LaneState& lane = lanes_[*index];
  const uint64_t number = ++lane.enqueued;
  {
    absl::MutexLock lock(&mutex_);
    lane.fresh.push_back({number, group, failure});
    notified_ = true;
    changed_.Signal();
  }
  absl::Status status = flags_->Write(stream, lane.reached.device, number);
  if (status.ok()) status = flags_->WaitAtLeast(stream, lane.done.device, number);
  return status;
}

bool CudaWireEngine::LosePeer(int peer, const std::string& reason) {
  engine_->LosePeer(peer, reason);
  return true;
}

// ------------------------------------------------------------ called by WireEngine

void CudaWireEngine::Notify() {
  absl::MutexLock lock(&mutex_);
  notified_ = true;
  changed_.Signal();
}

void CudaWireEngine::OnReceived(const WireCopy& copy) {
  absl::MutexLock lock(&mutex_);
  received_.push_back(copy);
  notified_ = true;
  changed_.Signal();
}

void CudaWireEngine::ReturnSendSlot(char* slot) {
  send_slots_.Return(slot);
  Notify();
}

void CudaWireEngine::OnGroupEnd(Lane lane, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  lanes_[IndexOf(lane)].ended = status;
  notified_ = true;
  changed_.Signal();
}

// ---------------------------------------------------------------- the copying thread

void CudaWireEngine::Run() {
  (void)events_->UseDevice();
  (void)prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  while (true) {
    if (Advance()) continue;
    const absl::Duration patience = Patience();
    const bool at_rest = AtRest();
    absl::MutexLock lock(&mutex_);
    if (std::exchange(notified_, false)) continue;
    if (interrupted_ && at_rest) break;
    changed_.WaitWithTimeout(&mutex_, patience);
  }
  absl::MutexLock lock(&mutex_);
  thread_is_done_ = true;
}

bool CudaWireEngine::Advance() {
  bool moved = EndGroups();
  moved |= BeginGroups();
  moved |= from_device_->Collect([this](const WireCopy& copy, const absl::Status& status) {
    engine_->EndSendCopy(copy, status);
  }) > 0;
  moved |= to_device_->Collect([this](const WireCopy& copy, const absl::Status& status) {
    engine_->EndReceive(copy, status);
  }) > 0;
  moved |= StartCopies();
  return moved;
}

bool CudaWireEngine::EndGroups() {
  bool ended = false;
  for (LaneState& lane : lanes_) {
    absl::MutexLock lock(&mutex_);
    if (!lane.ended.has_value()) continue;
    const Group& group = lane.waiting.front();
    if (!lane.ended->ok()) group.failure->Report(*lane.ended);
    if (!interrupted_) lane.done.Store(group.number);
    lane.waiting.pop_front();
    lane.in_progress = false;
    lane.ended.reset();
    ended = true;
  }
  return ended;
}

bool CudaWireEngine::BeginGroups() {
  bool begun = false;
  for (size_t i = 0; i < kLanes; ++i) {
    LaneState& lane = lanes_[i];
    {
      absl::MutexLock lock(&mutex_);
      for (Group& group : std::exchange(lane.fresh, {})) lane.waiting.push_back(std::move(group));
      // Groups that have not begun are dropped. StreamCommunicator fails them.
      if (interrupted_ && !lane.in_progress) lane.waiting.clear();
    }
    if (lane.in_progress || lane.waiting.empty()) continue;
    if (lane.reached.Load() < lane.waiting.front().number) continue;
    lane.in_progress = true;
    engine_->Begin(kAllLanes[i], lane.waiting.front().transfers);
    begun = true;
  }
  return begun;
}

bool CudaWireEngine::StartCopies() {
  std::vector<WireCopy> received;
  {
    absl::MutexLock lock(&mutex_);
    received = std::exchange(received_, {});
  }
  bool started = !received.empty();
  for (const WireCopy& copy : received) to_device_->Start(copy, cudaMemcpyHostToDevice);
  while (char* const slot = send_slots_.Take()) {
    WireCopy copy;
    if (!engine_->TakeCopy(&copy)) {
      send_slots_.Return(slot);
      break;
    }
    copy.slot = slot;
    from_device_->Start(copy, cudaMemcpyDeviceToHost);
    started = true;
  }
  return started;
}

absl::Duration CudaWireEngine::Patience() const {
  const bool streams_work = !from_device_->empty() || !to_device_->empty() ||
                            std::any_of(lanes_.begin(), lanes_.end(), [](const LaneState& lane) {
                              return !lane.in_progress && !lane.waiting.empty();
                            });
  return streams_work ? kPollPause : absl::InfiniteDuration();
}

bool CudaWireEngine::AtRest() const {
  return from_device_->empty() && to_device_->empty() &&
         std::none_of(lanes_.begin(), lanes_.end(),
                      [](const LaneState& lane) { return lane.in_progress; });
}

// -------------------------------------------------------------------------- ending

void CudaWireEngine::Interrupt() {
  {
    absl::MutexLock lock(&mutex_);
    interrupted_ = true;
    // Unblocks a CUDA call that waits because its stream is full.
    for (const LaneState& lane : lanes_) {
      if (lane.done.host != nullptr) lane.done.Store(kReleased);
    }
  }
  if (engine_ != nullptr) engine_->Abort("the communicator was aborted");
  Notify();
}

void CudaWireEngine::Abort() {
  Interrupt();
  absl::MutexLock ending(&ending_);
  if (std::exchange(ended_, true) || !thread_.joinable()) return;
  (void)events_->UseDevice();
  bool told = false;
  const absl::Time deadline = MonotonicNow() + options_.abort_timeout;
  while (true) {
    std::vector<cudaStream_t> streams;
    bool nothing_more_comes = false;
    {
      absl::MutexLock lock(&mutex_);
      for (const LaneState& lane : lanes_) streams.push_back(lane.stream);
      nothing_more_comes = thread_is_done_;
    }
    if (nothing_more_comes && std::none_of(streams.begin(), streams.end(), IsBusy) &&
        !from_device_->busy() && !to_device_->busy()) {
      break;
    }
    if (MonotonicNow() >= deadline && !std::exchange(told, true) && options_.on_stuck) {
      options_.on_stuck(absl::StrCat("copies of rank ", rank_, " took longer than ",
                                     absl::FormatDuration(options_.abort_timeout), " to end"));
    }
    absl::SleepFor(kAbortPause);
  }
  thread_.join();
}

}  // namespace ringattn::worker
