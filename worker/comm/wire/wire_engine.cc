#include "worker/comm/wire/wire_engine.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"
#include "worker/comm/wire/wire_connection.h"
#include "worker/comm/wire/wire_link.h"

namespace ringattn::worker {

// The link to one peer and its connections.
class WireEngine::Peer : public WirePeer {
 public:
  Peer(WireEngine* engine, int rank, std::vector<std::unique_ptr<WireStream>> streams)
      : engine_(*engine),
        rank_(rank),
        link_(/*runs_ahead=*/engine->staging_ == nullptr),
        receiving_(streams.size()),
        idle_(streams.size(), true) {
    for (std::unique_ptr<WireStream>& stream : streams) {
      connections_.push_back(std::make_unique<WireConnection>(
          this, static_cast<int>(connections_.size()), std::move(stream)));
    }
    open_ = static_cast<int>(connections_.size());
    engine_.counters_->connections.fetch_add(open_, std::memory_order_relaxed);
  }

  WireChunk TakeChunk(int stripe, std::string* frames) override {
    absl::MutexLock lock(&engine_.mutex_);
    if (stripe == 0) frames->append(std::exchange(grants_, {}));
    if (staging() == nullptr) return link_.TakeChunk(stripe);
    idle_[stripe] = staged_.empty();
    if (staged_.empty()) return {};
    const WireChunk chunk = staged_.front();
    staged_.pop_front();
    return chunk;
  }
  void OnSent(const WireChunk& chunk) override {
    engine_.counters_->sent_bytes.fetch_add(chunk.frame.length, std::memory_order_relaxed);
    absl::MutexLock lock(&engine_.mutex_);
    if (staging() != nullptr) ReturnSendSlot(chunk);
    chunk.transfer->group->Move(chunk.transfer, chunk.frame.length);
  }
  absl::Status OnGrant(const WireFrame& frame) override {
    {
      absl::MutexLock lock(&engine_.mutex_);
      if (absl::Status status = link_.OnGrant(frame); !status.ok()) return status;
      if (staging() != nullptr) staging()->OnSends();
    }
    WakeHelpers();  // the connection that read the grant writes next
    return absl::OkStatus();
  }
  absl::StatusOr<char*> OnData(int stripe, const WireFrame& frame) override {
    absl::MutexLock lock(&engine_.mutex_);
    if (staging() == nullptr || link_.failed()) return link_.OnData(stripe, frame);
    char* const slot = staging()->TakeReceiveSlot();
    if (slot == nullptr) {
      engine_.waits_slot_ = true;
      return nullptr;
    }
    const absl::StatusOr<char*> device = link_.OnData(stripe, frame);
    if (device.ok()) {
      receiving_[stripe] = {.chunk = {.frame = frame}, .device = *device, .slot = slot};
      return slot;
    }
    staging()->ReturnReceiveSlot(slot);
    engine_.OnFreeReceiveSlot();
    return device;
  }
  absl::Status OnDataEnd(int stripe, const WireFrame& frame) override {
    engine_.counters_->received_bytes.fetch_add(frame.length, std::memory_order_relaxed);
    absl::MutexLock lock(&engine_.mutex_);
    if (staging() == nullptr) return link_.OnDataEnd(frame);
    ++copies_;
    WireCopy copy = std::exchange(receiving_[stripe], {});
    copy.peer = rank_;
    staging()->OnReceived(copy);
    return absl::OkStatus();
  }
  void OnFailure(const WireStream::Result& result) override {
    absl::MutexLock lock(&engine_.mutex_);
    Lose(result.failure, result.why);
  }
  bool failed() override {
    absl::MutexLock lock(&engine_.mutex_);
    return link_.failed();
  }
  void Close(WireConnection* connection) override {
    absl::MutexLock lock(&engine_.mutex_);  // excludes Shutdown
    connection->Close();
    engine_.counters_->connections.fetch_sub(1, std::memory_order_relaxed);
    --open_;
    if (staging() != nullptr) ReturnSlotsOf(*connection);
    EndTransfers();
  }

  // Posts a transfer of a group. REQUIRES: the mutex is held, and the transfer has bytes.
  void Post(WireTransfer* transfer) {
    if (link_.failed()) return transfer->group->End(transfer, link_.status());
    absl::Status status;
    if (transfer->is_send()) {
      status = link_.PostSend(transfer);
    } else {
      WireFrame grant;
      status = link_.PostReceive(transfer, &grant);
      AppendFrame(grant, &grants_);
    }
    if (!status.ok()) Lose(WireFailure::kSizes, status.message());
  }

  // As in WireEngine. REQUIRES: the mutex is held.
  bool TakeCopy(WireCopy* copy) {
    if (staged_chunks_ >= kStagedPerPeer) return false;
    const WireChunk chunk = link_.TakeChunk(0);
    if (chunk.transfer == nullptr) return false;
    *copy = {.chunk = chunk, .device = const_cast<char*>(chunk.data), .peer = rank_};
    ++staged_chunks_;
    ++copies_;
    return true;
  }
  void EndSendCopy(const WireCopy& copy, const absl::Status& status) {
    --copies_;
    WireChunk chunk = copy.chunk;
    chunk.data = copy.slot;
    if (!status.ok()) Lose(WireFailure::kOther, status.message());
    if (link_.failed()) {
      ReturnSendSlot(chunk);
      return EndTransfers();
    }
    staged_.push_back(chunk);
    const auto idle = std::find(idle_.begin(), idle_.end(), true);
    if (idle != idle_.end()) {
      *idle = false;
      engine_.loops_[idle - idle_.begin()]->Wake();
    }
  }
  void EndReceive(const WireCopy& copy, const absl::Status& status) {
    --copies_;
    if (!status.ok()) Lose(WireFailure::kOther, status.message());
    if (link_.failed()) return EndTransfers();
    const absl::Status taken = link_.OnDataEnd(copy.chunk.frame);
    if (!taken.ok()) Lose(WireFailure::kProtocol, taken.message());
  }

  // Ends the link to the peer. The first cause counts. REQUIRES: the mutex is held.
  void Lose(WireFailure failure, absl::Status status) {
    if (link_.failed()) return;
    Fail(failure, std::move(status));
    engine_.counters_->lost_peers[static_cast<size_t>(failure)].fetch_add(
        1, std::memory_order_relaxed);
    engine_.WakeAll();
  }
  // As Lose, but not counted as a loss, and peers learn of it even if no Run is in progress here.
  // REQUIRES: the mutex is held.
  void Abort(const absl::Status& status) {
    if (!link_.failed()) Fail(WireFailure::kClosed, status);
    for (const auto& connection : connections_) connection->Shutdown();
  }

  // Wakes the loops that could help with the sends to the peer.
  void WakeHelpers() {
    size_t helpers = 0;
    {
      absl::MutexLock lock(&engine_.mutex_);
      if (staging() != nullptr) return;  // EndSendCopy does
      helpers = link_.ChunksForOthers();
    }
    const size_t loops = std::min(helpers + 1, connections_.size());
    for (size_t i = 1; i < loops; ++i) engine_.loops_[i]->Wake();
  }

  // The connection belongs to the loop of its index.
  const std::vector<std::unique_ptr<WireConnection>>& connections() const { return connections_; }

 private:
  // Ends the link to the peer. The first cause counts. REQUIRES: the mutex is held.
  void Lose(WireFailure failure, absl::string_view why) {
    Lose(failure, absl::UnavailableError(absl::StrCat("lost rank ", rank_, ": ", why)));
  }
  void Fail(WireFailure failure, absl::Status status) {
    link_.Fail(failure, std::move(status));
    for (const WireChunk& chunk : std::exchange(staged_, {})) ReturnSendSlot(chunk);
  }

  WireStaging* staging() const { return engine_.staging_; }
  void ReturnSendSlot(const WireChunk& chunk) {
    --staged_chunks_;
    staging()->ReturnSendSlot(const_cast<char*>(chunk.data));
  }
  // The connection was closed while it sent or received a chunk.
  void ReturnSlotsOf(const WireConnection& connection) {
    if (connection.chunk().transfer != nullptr) ReturnSendSlot(connection.chunk());
    const WireCopy received = std::exchange(receiving_[connection.stripe()], {});
    if (received.slot == nullptr) return;
    staging()->ReturnReceiveSlot(received.slot);
    engine_.OnFreeReceiveSlot();
  }
  // Nothing uses the memory of transfers any more, nor will.
  bool unused() const { return open_ == 0 && copies_ == 0; }
  void EndTransfers() {
    if (!unused()) return;
    for (WireGroup& group : engine_.groups_) {
      for (WireTransfer& transfer : group.transfers()) {
        if (transfer.peer() == rank_ && !transfer.done) group.End(&transfer, link_.status());
      }
    }
  }

  // The engine's mutex guards all that is not constant.
  WireEngine& engine_;
  const int rank_;
  WireLink link_;
  int open_ = 0;  // connections
  std::vector<std::unique_ptr<WireConnection>> connections_;
  std::string grants_;  // not sent yet

  // With staging.
  int copies_ = 0;                   // between device and slots
  int staged_chunks_ = 0;            // sends that have a slot or will have one
  std::deque<WireChunk> staged_;     // in slots, not yet taken by a connection
  std::vector<WireCopy> receiving_;  // by connection; slot null: none
  std::vector<bool> idle_;           // by connection: it waits for chunks to send
};

WireEngine::WireEngine(int rank, WireStreams streams, std::shared_ptr<WireCounters> counters,
                       WireStaging* staging)
    : counters_(std::move(counters)),
      staging_(staging),
      groups_{WireGroup([this] { OnGroupEnd(Lane::kInside); }),
              WireGroup([this] { OnGroupEnd(Lane::kBetween); })},
      peers_(streams.size()) {
  size_t loops = 1;
  for (const auto& stripes : streams) loops = std::max(loops, stripes.size());
  for (size_t i = 0; i < loops; ++i) loops_.push_back(std::make_unique<WireLoop>());
  for (int peer = 0; peer < static_cast<int>(streams.size()); ++peer) {
    if (peer == rank || streams[peer].empty()) continue;
    peers_[peer] = std::make_unique<Peer>(this, peer, std::move(streams[peer]));
  }
  for (const auto& peer : peers_) {
    if (peer == nullptr) continue;
    for (size_t i = 0; i < peer->connections().size(); ++i) {
      loops_[i]->Add(peer->connections()[i].get());
    }
  }
  for (size_t i = staging_ == nullptr ? 1 : 0; i < loops; ++i) {
    threads_.emplace_back([this, loop = loops_[i].get()] {
      while (!stopping_.load()) loop->Poll(absl::InfiniteDuration());
    });
  }
}

WireEngine::~WireEngine() {
  stopping_.store(true);
  WakeAll();
  for (std::thread& thread : threads_) thread.join();
  for (const auto& loop : loops_) loop->CloseAll();
}

absl::Status WireEngine::Run(Lane lane, const std::vector<PeerTransfer>& transfers,
                             absl::Duration timeout, std::atomic<int64_t>* progress) {
  const absl::Time deadline = MonotonicNow() + timeout;
  WireGroup& group = groups_[IndexOf(lane)];
  {
    absl::MutexLock lock(&mutex_);
    if (!aborted_.ok()) return aborted_;
    if (driver_ == std::thread::id()) driver_ = std::this_thread::get_id();
  }
  Push(Post(group, transfers, progress));
  bool late = false;
  while (true) {
    const bool in_time = EndsOrDrives(group, late ? absl::InfiniteFuture() : deadline);
    {
      absl::MutexLock lock(&mutex_);
      if (group.ended()) {
        StopDriving();
        return aborted_.ok() ? group.Result() : aborted_;
      }
    }
    const absl::Duration patience = deadline - MonotonicNow();
    if (!late && patience <= absl::ZeroDuration()) {
      late = true;
      EndLateTransfers(group, timeout);
    }
    if (in_time) loops_[0]->Poll(late ? absl::InfiniteDuration() : patience);
  }
}

std::vector<WireEngine::Peer*> WireEngine::Post(WireGroup& posted,
                                                const std::vector<PeerTransfer>& group,
                                                std::atomic<int64_t>* progress) {
  std::vector<Peer*> peers;
  absl::MutexLock lock(&mutex_);
  posted.Begin(group, progress);
  for (WireTransfer& transfer : posted.transfers()) {
    if (transfer.transfer->bytes == 0) {
      posted.MoveNothing(&transfer);
      continue;
    }
    Peer* const peer = peers_[transfer.peer()].get();
    if (std::find(peers.begin(), peers.end(), peer) == peers.end()) {
      peers.push_back(peer);  // a failed one, too: its connection here may be open
    }
    peer->Post(&transfer);
  }
  return peers;
}

void WireEngine::Push(const std::vector<Peer*>& peers) {
  bool drives = false;
  {
    absl::MutexLock lock(&mutex_);
    drives = driver_ == std::this_thread::get_id();
  }
  for (Peer* peer : peers) {
    peer->WakeHelpers();
    if (drives) loops_[0]->Push(peer);
  }
  // The driver may be polling. Woken, it lets all connections write.
  if (!drives) loops_[0]->Wake();
}

bool WireEngine::EndsOrDrives(const WireGroup& group, absl::Time deadline) {
  const std::thread::id self = std::this_thread::get_id();
  absl::MutexLock lock(&mutex_);
  const auto free = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return group.ended() || driver_ == std::thread::id() || driver_ == self;
  };
  // The loop's clock is MonotonicNow, so the wait is relative.
  if (!mutex_.AwaitWithTimeout(absl::Condition(&free), deadline - MonotonicNow())) return false;
  if (!group.ended()) driver_ = self;
  return true;
}

void WireEngine::StopDriving() {
  if (driver_ == std::this_thread::get_id()) driver_ = std::thread::id();
}

void WireEngine::EndLateTransfers(WireGroup& group, absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  for (const WireTransfer& transfer : group.transfers()) {
    if (transfer.done) continue;
    peers_[transfer.peer()]->Lose(
        WireFailure::kTimeout,
        absl::UnavailableError(absl::StrCat(transfer.is_send() ? "sending to" : "receiving from",
                                            " rank ", transfer.peer(), " took longer than ",
                                            absl::FormatDuration(timeout))));
  }
}

void WireEngine::Begin(Lane lane, const std::vector<PeerTransfer>& group) {
  (void)Post(groups_[IndexOf(lane)], group, &unreported_progress_);
  absl::MutexLock lock(&mutex_);
  staging_->OnSends();
  loops_[0]->Wake();  // it sends the grants
}

bool WireEngine::TakeCopy(WireCopy* copy) {
  absl::MutexLock lock(&mutex_);
  const int peers = static_cast<int>(peers_.size());
  for (int i = 0; i < peers; ++i) {
    const int peer = (next_copy_ + i) % peers;
    if (peers_[peer] == nullptr || !peers_[peer]->TakeCopy(copy)) continue;
    next_copy_ = (peer + 1) % peers;
    return true;
  }
  return false;
}

void WireEngine::EndSendCopy(const WireCopy& copy, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  peers_[copy.peer]->EndSendCopy(copy, status);
}

void WireEngine::EndReceive(const WireCopy& copy, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  staging_->ReturnReceiveSlot(copy.slot);
  OnFreeReceiveSlot();
  peers_[copy.peer]->EndReceive(copy, status);
}

void WireEngine::OnFreeReceiveSlot() {
  if (std::exchange(waits_slot_, false)) WakeAll();
}

void WireEngine::OnGroupEnd(Lane lane) {
  if (staging_ != nullptr) {
    return staging_->OnGroupEnd(lane, groups_[IndexOf(lane)].Result());
  }
  // The driver may be polling for its own group. Another thread waits for the mutex.
  if (std::this_thread::get_id() != driver_) loops_[0]->Wake();
}

void WireEngine::WakeAll() {
  for (const auto& loop : loops_) loop->Wake();
}

void WireEngine::LosePeer(int peer, const std::string& reason) {
  absl::MutexLock lock(&mutex_);
  peers_[peer]->Abort(absl::UnavailableError(absl::StrCat("lost rank ", peer, ": ", reason)));
  WakeAll();
}

void WireEngine::Abort(const std::string& reason) {
  absl::MutexLock lock(&mutex_);
  if (!aborted_.ok()) return;
  aborted_ = absl::UnavailableError(absl::StrCat("ring aborted: ", reason));
  for (const auto& peer : peers_) {
    if (peer != nullptr) peer->Abort(aborted_);
  }
  WakeAll();
}

}  // namespace ringattn::worker
