#include "worker/comm/peer/peer_copy_engine.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "worker/device/cuda/cuda_status.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;

// Polling interval for posted sends while receives wait for them, or for room to post. Short
// compared with a small group. Timer slack triples such a pause, and a group starts when its sends
// have been posted, so the thread first polls without pausing for kSpin.
constexpr absl::Duration kPollPause = absl::Microseconds(20);
constexpr absl::Duration kSpin = absl::Microseconds(500);
// Enough to wake all links of a GPU: addresses are interleaved over them, and fewer than 32 KiB
// leave some out (4 KiB: one of 18, H100). Links sleep after 50 ms without copies.
constexpr int64_t kWakeBytes = 128 << 10;
constexpr absl::Duration kSurelyAwake = absl::Milliseconds(10);
// Larger than any transfer's number, and valid as the operand of an "at least" wait.
constexpr uint64_t kReleased = uint64_t{1} << 62;
constexpr absl::Duration kReleasePause = absl::Microseconds(200);

void Store(uint64_t& word, uint64_t value) { __atomic_store_n(&word, value, __ATOMIC_RELEASE); }

// Enqueues nothing, because the stream may be full. A failed stream is not busy.
bool IsBusy(cudaStream_t stream) {
  return stream != nullptr && cudaStreamQuery(stream) == cudaErrorNotReady;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PeerCopyEngine>> PeerCopyEngine::Create(
    PeerCopyOptions options, CudaEventPool* events, const StreamFlags* flags, DeviceRegions regions,
    std::unique_ptr<PeerSegment> own, std::vector<PeerMapping> peers) {
  if (absl::Status status = events->UseDevice(); !status.ok()) return status;
  std::unique_ptr<PeerCopyEngine> engine(new PeerCopyEngine(
      std::move(options), events, flags, std::move(regions), std::move(own), std::move(peers)));
  if (absl::Status status = engine->MakeStreams(); !status.ok()) return status;
  engine->thread_ = std::thread([raw = engine.get()] { raw->Run(); });
  pthread_setname_np(engine->thread_.native_handle(), "peer_copies");
  return engine;
}

PeerCopyEngine::PeerCopyEngine(PeerCopyOptions options, CudaEventPool* events,
                               const StreamFlags* flags, DeviceRegions regions,
                               std::unique_ptr<PeerSegment> own, std::vector<PeerMapping> peers)
    : options_(std::move(options)),
      events_(events),
      flags_(flags),
      regions_(std::move(regions)),
      own_(std::move(own)),
      peers_(std::move(peers)),
      streams_(peers_.size(), nullptr),
      enqueued_(peers_.size()),
      pulled_(peers_.size()),
      outgoing_(peers_.size()),
      fresh_(peers_.size()) {}

absl::Status PeerCopyEngine::MakeStreams() {
  absl::Status status;
  for (size_t peer = 0; peer < peers_.size() && status.ok(); ++peer) {
    if (peers_[peer].segment == nullptr) continue;
    status = CudaStatus(cudaStreamCreateWithFlags(&streams_[peer], cudaStreamNonBlocking),
                        "cudaStreamCreateWithFlags");
  }
  if (status.ok()) {
    status = CudaStatus(cudaStreamCreateWithFlags(&wake_stream_, cudaStreamNonBlocking),
                        "cudaStreamCreateWithFlags");
  }
  if (status.ok()) status = CudaStatus(cudaMalloc(&woken_into_, kWakeBytes), "cudaMalloc");
  return status;
}

PeerCopyEngine::~PeerCopyEngine() {
  Abort();
  if (!events_->UseDevice().ok()) return;
  for (cudaStream_t stream : streams_) {
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
  }
  if (wake_stream_ != nullptr) (void)cudaStreamDestroy(wake_stream_);
  if (woken_into_ != nullptr) (void)cudaFree(woken_into_);
  for (const PeerMapping& peer : peers_) {
    for (const DeviceRegion& region : peer.regions) {
      if (peer.mapper.unmap) peer.mapper.unmap(region.base);
    }
  }
}

absl::Status PeerCopyEngine::PublishRegions(const std::vector<DeviceRegion>& regions,
                                            PeerSegment& segment) {
  absl::Status status;
  for (size_t i = segment.region_count(); i < regions.size() && status.ok(); ++i) {
    PeerRegion entry;
    entry.base = reinterpret_cast<uint64_t>(regions[i].base);
    entry.bytes = regions[i].bytes;
    if (regions[i].descriptor < 0) {
      cudaIpcMemHandle_t handle;
      static_assert(sizeof(handle) == sizeof(entry.ipc_handle));
      status = CudaStatus(cudaIpcGetMemHandle(&handle, regions[i].base), "cudaIpcGetMemHandle");
      std::memcpy(entry.ipc_handle, &handle, sizeof(handle));
    }
    if (status.ok()) status = segment.AddRegion(entry);
  }
  return status;
}

absl::Status PeerCopyEngine::MapRegions(PeerMapping& peer) {
  const int count = peer.segment->region_count();
  while (static_cast<int>(peer.regions.size()) < count) {
    const int index = static_cast<int>(peer.regions.size());
    const PeerRegion entry = peer.segment->region(index);
    absl::StatusOr<char*> base = peer.mapper.map(index, entry);
    if (!base.ok()) return base.status();
    peer.regions.push_back({*base, entry.bytes});
  }
  return absl::OkStatus();
}

absl::Status PeerCopyEngine::Check(const std::vector<PeerTransfer>& group) const {
  for (const PeerTransfer& transfer : group) {
    const bool known = transfer.peer >= 0 && transfer.peer < static_cast<int>(peers_.size()) &&
                       peers_[transfer.peer].segment != nullptr;
    if (!known) {
      return absl::InternalError(
          absl::StrCat("rank ", transfer.peer, " is not a peer of this ring"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<PostedSend> PeerCopyEngine::DescribeSend(const PeerTransfer& send) {
  // Memory may have grown since the last query.
  for (bool looked : {false, true}) {
    for (size_t i = 0; i < known_regions_.size(); ++i) {
      if (!known_regions_[i].Contains(send.data, send.bytes)) continue;
      PostedSend posted_send;
      posted_send.region = static_cast<int32_t>(i);
      posted_send.offset = static_cast<char*>(send.data) - known_regions_[i].base;
      posted_send.bytes = send.bytes;
      return posted_send;
    }
    if (looked) break;
    known_regions_ = regions_();
    absl::Status status = PublishRegions(known_regions_, *own_);
    if (!status.ok()) return status;
  }
  return absl::InternalError("the bytes to send are outside of the memory that peers can map");
}

absl::Status PeerCopyEngine::Enqueue(const std::vector<PeerTransfer>& group, cudaStream_t stream,
                                     const std::shared_ptr<GroupFailure>&) {
  absl::Status status = Check(group);
  if (!status.ok()) return status;
  // When the stream reaches this point, the group's targets are free.
  auto targets_free = std::make_shared<CudaEvent>(events_, nullptr, 0);
  status = targets_free->RecordEnd(stream);
  if (!status.ok()) return status;

  struct WithPeer {
    std::vector<PostedSend> sends;
    Pulls pulls;
  };
  std::vector<WithPeer> work(peers_.size());
  std::vector<Enqueued> last(peers_.size());  // numbers of the group's last transfers; 0: none
  for (const PeerTransfer& transfer : group) {
    WithPeer& with_peer = work[transfer.peer];
    if (transfer.kind == Kind::kSend) {
      absl::StatusOr<PostedSend> posted_send = DescribeSend(transfer);
      if (!posted_send.ok()) return posted_send.status();
      with_peer.sends.push_back(*posted_send);
      last[transfer.peer].sends = ++enqueued_[transfer.peer].sends;
    } else {
      with_peer.pulls.push_back({transfer.data, transfer.bytes, false, targets_free});
      last[transfer.peer].receives = ++enqueued_[transfer.peer].receives;
    }
  }
  {
    absl::MutexLock lock(&mutex_);
    if (interrupted_) return absl::UnavailableError("the communicator was aborted");
    group_streams_.insert(stream);
    for (size_t peer = 0; peer < work.size(); ++peer) {
      if (!work[peer].sends.empty()) work[peer].sends.back().ends_group = 1;
      if (!work[peer].pulls.empty()) work[peer].pulls.back().ends_group = true;
      for (PostedSend& posted_send : work[peer].sends) outgoing_[peer].sends.push_back(posted_send);
      for (Pull& pull : work[peer].pulls) fresh_[peer].push_back(std::move(pull));
    }
    // On this thread: the other one may take a while to wake up, and peers wait.
    (void)Post();
    has_fresh_ = true;
    changed_.Signal();
  }
  return PutFlags(last, stream);
}

absl::Status PeerCopyEngine::PutFlags(const std::vector<Enqueued>& last,
                                      cudaStream_t stream) const {
  absl::Status status;
  for (size_t peer = 0; peer < last.size() && status.ok(); ++peer) {
    if (last[peer].sends == 0) continue;
    PeerSegment& segment = *peers_[peer].segment;
    status = flags_->Write(stream, segment.OnDevice(&segment.lane(options_.rank).ready),
                           last[peer].sends);
  }
  for (size_t peer = 0; peer < last.size() && status.ok(); ++peer) {
    PeerLane& words = own_->lane(static_cast<int>(peer));
    if (last[peer].sends != 0) {
      status = flags_->WaitAtLeast(stream, own_->OnDevice(&words.pulled), last[peer].sends);
    }
    if (status.ok() && last[peer].receives != 0) {
      status = flags_->WaitAtLeast(stream, own_->OnDevice(&words.received), last[peer].receives);
    }
  }
  return status;
}

void PeerCopyEngine::Run() {
  std::vector<Pulls> pulls(peers_.size());
  absl::Status status = events_->UseDevice();
  bool pending = false;
  absl::Time spin_end = absl::InfinitePast();
  absl::MutexLock lock(&mutex_);
  while (!interrupted_) {
    if (!status.ok()) {
      // The watcher aborts the ring. Until then there is nothing to do.
      error_ = status;
      changed_.Wait(&mutex_);
      continue;
    }
    if (std::exchange(wake_wanted_, false)) {
      mutex_.Unlock();
      status = Wake();
      mutex_.Lock();
      continue;
    }
    if (!pending && !has_fresh_) {
      changed_.Wait(&mutex_);
      continue;
    }
    if (!has_fresh_ && MonotonicNow() >= spin_end) changed_.WaitWithTimeout(&mutex_, kPollPause);
    if (std::exchange(has_fresh_, false)) spin_end = MonotonicNow() + kSpin;
    const bool all_posted = Post();
    for (size_t peer = 0; peer < pulls.size(); ++peer) {
      for (Pull& pull : fresh_[peer]) pulls[peer].push_back(std::move(pull));
      fresh_[peer].clear();
    }
    mutex_.Unlock();
    status = Advance(pulls);
    pending = !all_posted || std::any_of(pulls.begin(), pulls.end(),
                                         [](const Pulls& from_peer) { return !from_peer.empty(); });
    if (pending) std::this_thread::yield();
    mutex_.Lock();
  }
  thread_is_done_ = true;
}

void PeerCopyEngine::WakeLinks() {
  absl::MutexLock lock(&mutex_);
  wake_wanted_ = true;
  changed_.Signal();
}

absl::Status PeerCopyEngine::Wake() {
  const absl::Time now = MonotonicNow();
  // After the clock was set back, the difference is meaningless.
  if (now >= last_copy_ && now - last_copy_ < kSurelyAwake) return absl::OkStatus();
  last_copy_ = now;
  absl::Status status;
  for (const PeerMapping& peer : peers_) {
    if (!peer.mapper.outlives_peer || peer.regions.empty()) continue;
    const int64_t bytes = std::min(kWakeBytes, peer.regions.front().bytes);
    status.Update(CudaStatus(cudaMemcpyAsync(woken_into_, peer.regions.front().base, bytes,
                                             cudaMemcpyDefault, wake_stream_),
                             "cudaMemcpyAsync to wake links"));
  }
  return status;
}

absl::Status PeerCopyEngine::Advance(std::vector<Pulls>& pulls) {
  absl::Status status;
  for (int peer = 0; peer < static_cast<int>(pulls.size()) && status.ok(); ++peer) {
    if (peers_[peer].segment != nullptr) status = PullFrom(peer, pulls[peer]);
  }
  return status;
}

bool PeerCopyEngine::Post() {
  bool all = true;
  for (size_t peer = 0; peer < outgoing_.size(); ++peer) {
    auto& [sends, posted] = outgoing_[peer];
    if (sends.empty()) continue;
    PeerLane& words = peers_[peer].segment->lane(options_.rank);
    const uint64_t taken = words.taken.load(std::memory_order_acquire);
    while (!sends.empty() && posted - taken < kPostedSends) {
      ++posted;
      words.sends[posted % kPostedSends] = sends.front();
      sends.pop_front();
      words.posted.store(posted, std::memory_order_release);
    }
    all = all && sends.empty();
  }
  return all;
}

absl::Status PeerCopyEngine::PullFrom(int peer, Pulls& pulls) {
  PeerLane& words = own_->lane(peer);
  uint64_t& pulled = pulled_[peer];
  const uint64_t posted = words.posted.load(std::memory_order_acquire);
  while (!pulls.empty() && pulled < posted) {
    ++pulled;
    const PostedSend posted_send = words.sends[pulled % kPostedSends];
    words.taken.store(pulled, std::memory_order_release);
    absl::Status status = StartCopy(peer, pulled, posted_send, pulls.front());
    if (!status.ok()) return status;
    pulls.pop_front();
  }
  return absl::OkStatus();
}

absl::Status PeerCopyEngine::StartCopy(int peer, uint64_t number, const PostedSend& posted_send,
                                       const Pull& pull) {
  if (posted_send.bytes != pull.bytes) {
    return absl::InternalError(absl::StrCat("rank ", peer, " sends ", posted_send.bytes,
                                            " bytes where ", pull.bytes, " are expected"));
  }
  PeerMapping& mapping = peers_[peer];
  if (posted_send.region >= static_cast<int>(mapping.regions.size())) {
    if (absl::Status status = MapRegions(mapping); !status.ok()) return status;
  }
  if (posted_send.region < 0 || posted_send.region >= static_cast<int>(mapping.regions.size()) ||
      posted_send.offset < 0 ||
      posted_send.offset > mapping.regions[posted_send.region].bytes - posted_send.bytes) {
    return absl::InternalError(absl::StrCat("rank ", peer, " sends bytes outside of its memory"));
  }
  const DeviceRegion& source = mapping.regions[posted_send.region];
  const cudaStream_t stream = streams_[peer];
  PeerLane& words = own_->lane(peer);
  PeerSegment& theirs = *peers_[peer].segment;
  last_copy_ = MonotonicNow();
  absl::Status status = pull.targets_free->MakeStreamWait(stream);
  if (status.ok()) status = flags_->WaitAtLeast(stream, own_->OnDevice(&words.ready), number);
  if (status.ok()) {
    status = CudaStatus(cudaMemcpyAsync(pull.target, source.base + posted_send.offset, pull.bytes,
                                        cudaMemcpyDefault, stream),
                        "cudaMemcpyAsync");
  }
  if (status.ok() && posted_send.ends_group != 0) {
    status = flags_->Write(stream, theirs.OnDevice(&theirs.lane(options_.rank).pulled), number);
  }
  if (status.ok() && pull.ends_group) {
    status = flags_->Write(stream, own_->OnDevice(&words.received), number);
  }
  return status;
}

absl::Status PeerCopyEngine::AsyncError() {
  absl::MutexLock lock(&mutex_);
  return error_;
}

void PeerCopyEngine::Interrupt() {
  {
    absl::MutexLock lock(&mutex_);
    interrupted_ = true;
    changed_.SignalAll();
  }
  // Stops waiting for a peer that does not reply.
  for (const PeerMapping& peer : peers_) {
    if (peer.mapper.interrupted != nullptr) *peer.mapper.interrupted = true;
  }
  // Unblocks a CUDA call that waits because its stream is full.
  Release();
}

void PeerCopyEngine::Release() {
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    PeerLane& words = own_->lane(static_cast<int>(peer));
    for (uint64_t* word : {&words.ready, &words.pulled, &words.received}) Store(*word, kReleased);
  }
}

void PeerCopyEngine::Abort() {
  Interrupt();
  absl::MutexLock ending(&ending_);
  if (std::exchange(ended_, true) || !thread_.joinable()) return;
  bool told = false;
  (void)events_->UseDevice();
  const absl::Time deadline = MonotonicNow() + options_.abort_timeout;
  while (true) {
    // Repeatedly, because copies of peers that are still in flight write smaller numbers.
    Release();
    std::vector<cudaStream_t> streams = streams_;
    bool nothing_more_comes = false;
    {
      absl::MutexLock lock(&mutex_);
      streams.insert(streams.end(), group_streams_.begin(), group_streams_.end());
      streams.push_back(wake_stream_);
      nothing_more_comes = thread_is_done_;
    }
    if (nothing_more_comes && std::none_of(streams.begin(), streams.end(), IsBusy)) break;
    if (MonotonicNow() >= deadline && !std::exchange(told, true) && options_.on_stuck) {
      options_.on_stuck(absl::StrCat("copies of rank ", options_.rank, " took longer than ",
                                     absl::FormatDuration(options_.abort_timeout), " to end"));
    }
    absl::SleepFor(kReleasePause);
  }
  thread_.join();
}

}  // namespace ringattn::worker
