#include "worker/comm/wire/wire_engine.h"

#include <algorithm>
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
      : engine_(*engine), rank_(rank) {
    for (std::unique_ptr<WireStream>& stream : streams) {
      connections_.push_back(std::make_unique<WireConnection>(
          this, static_cast<int>(connections_.size()), std::move(stream)));
    }
    open_ = static_cast<int>(connections_.size());
    engine_.counters_->connections.fetch_add(open_, std::memory_order_relaxed);
  }

  WireChunk TakeChunk(int stripe) override {
    absl::MutexLock lock(&engine_.mutex_);
    return link_.TakeChunk(stripe);
  }
  void OnSent(const WireChunk& chunk) override {
    engine_.counters_->sent_bytes.fetch_add(chunk.frame.length, std::memory_order_relaxed);
    absl::MutexLock lock(&engine_.mutex_);
    chunk.transfer->group->Move(chunk.transfer, chunk.frame.length);
  }
  absl::Status OnGrant(const WireFrame& frame) override {
    {
      absl::MutexLock lock(&engine_.mutex_);
      if (absl::Status status = link_.OnGrant(frame); !status.ok()) return status;
    }
    WakeHelpers();  // the connection that read the grant writes next
    return absl::OkStatus();
  }
  absl::StatusOr<char*> OnData(int stripe, const WireFrame& frame) override {
    absl::MutexLock lock(&engine_.mutex_);
    return link_.OnData(stripe, frame);
  }
  absl::Status OnDataEnd(const WireFrame& frame) override {
    engine_.counters_->received_bytes.fetch_add(frame.length, std::memory_order_relaxed);
    absl::MutexLock lock(&engine_.mutex_);
    return link_.OnDataEnd(frame);
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
    if (--open_ > 0) return;
    for (WireGroup& group : engine_.groups_) {
      for (WireTransfer& transfer : group.transfers()) {
        if (transfer.peer() == rank_ && !transfer.done) group.End(&transfer, link_.status());
      }
    }
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
      connections_[0]->AddGrant(grant);
    }
    if (!status.ok()) Lose(WireFailure::kSizes, status.message());
  }

  // Ends the link to the peer. The first cause counts. REQUIRES: the mutex is held.
  void Lose(WireFailure failure, absl::Status status) {
    if (link_.failed()) return;
    link_.Fail(failure, std::move(status));
    engine_.counters_->lost_peers[static_cast<size_t>(failure)].fetch_add(
        1, std::memory_order_relaxed);
    engine_.WakeAll();
  }

  // As Lose, but not counted as a loss, and peers learn of it even if no Run is in progress here.
  // REQUIRES: the mutex is held.
  void Abort(const absl::Status& status) {
    if (!link_.failed()) link_.Fail(WireFailure::kClosed, status);
    for (const auto& connection : connections_) connection->Shutdown();
  }

  // Wakes the loops that could help with the sends to the peer.
  void WakeHelpers() {
    size_t helpers = 0;
    {
      absl::MutexLock lock(&engine_.mutex_);
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

  WireEngine& engine_;
  const int rank_;
  WireLink link_;  // guarded by the engine's mutex, as is open_
  int open_ = 0;   // connections
  std::vector<std::unique_ptr<WireConnection>> connections_;
};

WireEngine::WireEngine(int rank, WireStreams streams, std::shared_ptr<WireCounters> counters)
    : counters_(std::move(counters)),
      groups_{WireGroup([this] { OnGroupEnd(); }), WireGroup([this] { OnGroupEnd(); })},
      peers_(streams.size()) {
  size_t loops = 1;
  for (const auto& stripes : streams) loops = std::max(loops, stripes.size());
  for (size_t i = 0; i < loops; ++i) loops_.push_back(std::make_unique<WireLoop>());
  for (int peer = 0; peer < static_cast<int>(streams.size()); ++peer) {
    if (peer != rank) peers_[peer] = std::make_unique<Peer>(this, peer, std::move(streams[peer]));
  }
  for (const auto& peer : peers_) {
    if (peer == nullptr) continue;
    for (size_t i = 0; i < peer->connections().size(); ++i) {
      loops_[i]->Add(peer->connections()[i].get());
    }
  }
  for (size_t i = 1; i < loops; ++i) {
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

void WireEngine::OnGroupEnd() {
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
