#include "worker/comm/wire/wire_engine.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"
#include "worker/device/host_queue.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;

// Each counts as progress, so that a slow link shows some.
constexpr int64_t kProgressBytes = int64_t{16} << 20;
// How much a connection moves in one direction before others get their turn.
constexpr size_t kTurnBytes = 4 << 20;
// A peer's grants ahead of the sends here. A group has at most a few transfers per peer.
constexpr size_t kMaxGrantsAhead = 1 << 16;

}  // namespace

// What this rank and one peer have in common. Guarded by the engine's mutex_, except `stripes`.
struct WireEngine::Link {
  // A posted send whose grant has not arrived.
  struct Ungranted {
    int64_t bytes = 0;
    bool sent = false;  // eagerly
  };
  // A transfer that arrived before its receive was posted.
  struct Eager {
    std::string bytes;
    bool complete = false;
  };

  int peer = 0;
  std::vector<std::unique_ptr<Stripe>> stripes;
  int open = 0;  // connections
  WireFailure failure = WireFailure::kNone;
  absl::Status status;  // once failed

  uint64_t sends = 0;                       // posted
  uint64_t receives = 0;                    // posted
  uint64_t grants = 0;                      // arrived
  std::deque<int64_t> grants_ahead;         // their sizes, for sends grants - size ... of grants
  std::deque<Ungranted> ungranted;          // sends [grants, sends)
  int64_t eager_sent_bytes = 0;             // of ungranted
  std::deque<Transfer*> unassigned;         // sends with bytes that no connection has taken
  std::map<uint64_t, Transfer*> receiving;  // by sequence
  std::map<uint64_t, Eager> eager;          // by sequence
  int64_t eager_bytes = 0;                  // of `eager`
};

// One connection. Used by its loop's thread, except Shutdown.
class WireEngine::Stripe : public FrameSink {
 public:
  Stripe(WireEngine* engine, Link* link, int index, std::unique_ptr<WireStream> stream)
      : engine_(engine), link_(link), index_(index), stream_(std::move(stream)) {}

  Link* link() const { return link_; }
  int fd() const { return stream_->fd(); }
  bool open() const { return stream_ != nullptr; }
  void Close() { stream_ = nullptr; }
  void Shutdown() {
    if (stream_ != nullptr) stream_->Shutdown();
  }

  // Queues a grant, to be sent before the next chunk.
  void AddGrant(const WireFrame& grant) { AppendFrame(grant, &grants_); }

  // Reads and writes what is possible in a turn. Returns false if the connection has failed. Sets
  // *wants_write if there is more to write, and *reads_more, if `readable`, if there is more to
  // read although the socket may not be readable.
  bool Work(bool readable, bool* wants_write, bool* reads_more) {
    WireStream::Result result;
    if (readable) result = ReadFrames(reads_more);
    if (result.ok()) result = WriteFrames(wants_write);
    if (result.ok()) {
      *wants_write = *wants_write || stream_->WantsWrite();
      return true;
    }
    engine_->FailWith(link_, result);
    return false;
  }

  absl::Status OnGrant(const WireFrame& frame) override { return engine_->OnGrant(link_, frame); }
  absl::StatusOr<char*> OnData(const WireFrame& frame) override {
    return engine_->OnData(link_, index_, frame);
  }
  absl::Status OnDataEnd(const WireFrame& frame) override {
    return engine_->OnDataEnd(link_, frame);
  }

 private:
  WireStream::Result ReadFrames(bool* reads_more) {
    *reads_more = false;
    for (size_t moved = 0; moved < kTurnBytes;) {
      const FrameReader::Buffer buffer = reader_.Next();
      WireStream::Result result = stream_->Read(buffer.data, buffer.bytes);
      if (!result.ok() || result.bytes == 0) return result;
      const absl::Status status = reader_.Advance(result.bytes, *this);
      if (!status.ok()) {
        const bool sizes = absl::IsFailedPrecondition(status);
        return {.failure = sizes ? WireFailure::kSizes : WireFailure::kProtocol,
                .why = std::string(status.message())};
      }
      moved += result.bytes;
    }
    *reads_more = stream_->HasBuffered();
    return {};
  }

  WireStream::Result WriteFrames(bool* wants_write) {
    *wants_write = false;
    for (size_t moved = 0;;) {
      if (head_.empty() && payload_bytes_ == 0 && !TakeFrame()) return stream_->Flush();
      if (moved >= kTurnBytes) break;
      const iovec parts[2] = {{head_.data() + head_sent_, head_.size() - head_sent_},
                              {const_cast<char*>(payload_), payload_bytes_}};
      const bool has_head = !head_.empty();
      WireStream::Result result =
          stream_->Write(has_head ? parts : parts + 1, has_head && payload_bytes_ > 0 ? 2 : 1);
      if (!result.ok()) return result;
      if (result.bytes == 0) break;
      moved += result.bytes;
      Advance(result.bytes);
    }
    *wants_write = true;
    return {};
  }

  // Prepares what to send next: queued grants and a chunk. Returns false if there is neither.
  bool TakeFrame() {
    head_ = std::exchange(grants_, {});
    head_sent_ = 0;
    chunk_ = engine_->TakeChunk(link_, index_);
    if (chunk_.transfer != nullptr) {
      AppendFrame(chunk_.frame, &head_);
      payload_ = chunk_.data;
      payload_bytes_ = chunk_.frame.length;
    }
    return !head_.empty();
  }

  void Advance(size_t bytes) {
    const size_t of_head = std::min(bytes, head_.size() - head_sent_);
    head_sent_ += of_head;
    if (head_sent_ == head_.size()) {
      head_.clear();
      head_sent_ = 0;
    }
    payload_ += bytes - of_head;
    payload_bytes_ -= bytes - of_head;
    if (!head_.empty() || payload_bytes_ > 0 || chunk_.transfer == nullptr) return;
    engine_->OnSent(std::exchange(chunk_, {}));
  }

  WireEngine* const engine_;
  Link* const link_;
  const int index_;
  std::unique_ptr<WireStream> stream_;
  FrameReader reader_;
  std::string grants_;  // not sent yet
  std::string head_;    // being sent, before the payload
  size_t head_sent_ = 0;
  const char* payload_ = nullptr;  // what remains
  size_t payload_bytes_ = 0;
  Chunk chunk_;
};

// The connections of one index to all peers. Used by one thread, except Wake.
class WireEngine::Loop {
 public:
  explicit Loop(WireEngine* engine)
      : engine_(engine),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    epoll_event event{};
    event.events = EPOLLIN;
    // Without both, the process has no descriptors left and cannot serve.
    if (epoll_ < 0 || wake_ < 0 || epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) != 0) {
      std::abort();
    }
  }
  ~Loop() {
    close(epoll_);
    close(wake_);
  }

  void Add(Stripe* stripe) {
    // What followed the handshake may have been read with it.
    stripes_.push_back({.stripe = stripe, .reads_more = true});
    reads_more_ = true;
    Control(EPOLL_CTL_ADD, stripe, EPOLLIN, stripes_.size() - 1);
  }

  // May be called from any thread.
  void Wake() {
    const uint64_t one = 1;
    (void)!write(wake_, &one, sizeof(one));
  }

  // Waits for sockets or Wake, and does what is possible.
  void Poll(absl::Duration patience) {
    const int timeout_ms = patience == absl::InfiniteDuration()
                               ? -1
                               : static_cast<int>(absl::ToInt64Milliseconds(std::min(
                                     std::max(patience, absl::ZeroDuration()), absl::Hours(1)))) +
                                     (patience > absl::ZeroDuration() ? 1 : 0);
    const bool again = std::exchange(reads_more_, false);
    epoll_event events[64];
    const int count = epoll_wait(epoll_, events, 64, again ? 0 : timeout_ms);
    bool woken = false;
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 == 0) {
        uint64_t wakes = 0;
        (void)!read(wake_, &wakes, sizeof(wakes));
        woken = true;
        continue;
      }
      const bool readable = (events[i].events & ~static_cast<uint32_t>(EPOLLOUT)) != 0;
      Work(events[i].data.u64 - 1, readable);
    }
    for (size_t i = 0; again && i < stripes_.size(); ++i) {
      if (stripes_[i].reads_more) Work(i, true);
    }
    for (size_t i = 0; woken && i < stripes_.size(); ++i) Work(i, false);
  }

  // Lets the link's connection here write what it can.
  void Push(const Link* link) {
    for (size_t i = 0; i < stripes_.size(); ++i) {
      if (stripes_[i].stripe->link() == link) Work(i, false);
    }
  }

  // Closes all connections.
  void CloseAll() {
    for (Entry& entry : stripes_) Close(entry.stripe);
  }

 private:
  struct Entry {
    Stripe* stripe = nullptr;
    bool wants_write = false;
    bool reads_more = false;
  };

  void Control(int operation, Stripe* stripe, uint32_t events, size_t index) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = index + 1;
    if (epoll_ctl(epoll_, operation, stripe->fd(), &event) == 0) return;
    engine_->FailWith(stripe->link(), WireStream::Failed(errno));
  }

  void Work(size_t index, bool readable) {
    Entry& entry = stripes_[index];
    if (!entry.stripe->open()) return;
    bool failed = false;
    {
      absl::MutexLock lock(&engine_->mutex_);
      failed = entry.stripe->link()->failure != WireFailure::kNone;
    }
    bool wants_write = false;
    if (failed || !entry.stripe->Work(readable, &wants_write, &entry.reads_more)) {
      entry.reads_more = false;
      Close(entry.stripe);
      return;
    }
    reads_more_ |= entry.reads_more;
    if (wants_write == entry.wants_write) return;
    entry.wants_write = wants_write;
    Control(EPOLL_CTL_MOD, entry.stripe, wants_write ? EPOLLIN | EPOLLOUT : EPOLLIN, index);
  }

  void Close(Stripe* stripe) {
    if (!stripe->open()) return;
    absl::MutexLock lock(&engine_->mutex_);  // excludes Shutdown
    stripe->Close();
    engine_->OnClosed(stripe->link());
  }

  WireEngine* const engine_;
  const int epoll_;
  const int wake_;
  std::vector<Entry> stripes_;
  bool reads_more_ = false;  // of any of them
};

WireEngine::WireEngine(int rank, WireStreams streams, std::shared_ptr<WireCounters> counters)
    : rank_(rank), counters_(std::move(counters)), links_(streams.size()) {
  size_t loops = 1;
  for (const auto& stripes : streams) loops = std::max(loops, stripes.size());
  for (size_t i = 0; i < loops; ++i) loops_.push_back(std::make_unique<Loop>(this));
  for (size_t peer = 0; peer < streams.size(); ++peer) {
    if (static_cast<int>(peer) == rank_) continue;
    links_[peer] = std::make_unique<Link>();
    Link* const link = links_[peer].get();
    link->peer = static_cast<int>(peer);
    link->open = static_cast<int>(streams[peer].size());
    counters_->connections.fetch_add(link->open, std::memory_order_relaxed);
    for (size_t i = 0; i < streams[peer].size(); ++i) {
      link->stripes.push_back(
          std::make_unique<Stripe>(this, link, static_cast<int>(i), std::move(streams[peer][i])));
    }
  }
  for (const auto& link : links_) {
    if (link == nullptr) continue;
    for (size_t i = 0; i < link->stripes.size(); ++i) loops_[i]->Add(link->stripes[i].get());
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

absl::Status WireEngine::Run(const std::vector<PeerTransfer>& group, absl::Duration timeout,
                             std::atomic<int64_t>* progress) {
  const absl::Time deadline = MonotonicNow() + timeout;
  {
    absl::MutexLock lock(&mutex_);
    if (!aborted_.ok()) return aborted_;
    progress_ = progress;
    runner_ = std::this_thread::get_id();
  }
  for (Link* link : Post(group)) {
    WakeHelpers(link);
    loops_[0]->Push(link);
  }
  bool late = false;
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (unfinished_ == 0) return StatusOfGroup();
    }
    const absl::Duration patience = deadline - MonotonicNow();
    if (!late && patience <= absl::ZeroDuration()) {
      late = true;
      EndLateTransfers(timeout);
    }
    loops_[0]->Poll(late ? absl::InfiniteDuration() : patience);
  }
}

std::vector<WireEngine::Link*> WireEngine::Post(const std::vector<PeerTransfer>& group) {
  std::vector<Link*> links;
  absl::MutexLock lock(&mutex_);
  group_.clear();
  group_.resize(group.size());
  unfinished_ = group.size();
  for (size_t i = 0; i < group.size(); ++i) {
    Transfer& transfer = group_[i];
    transfer.transfer = &group[i];
    transfer.link = links_[group[i].peer].get();
    if (group[i].bytes == 0) {
      progress_->fetch_add(1, std::memory_order_relaxed);
      End(&transfer, absl::OkStatus());
      continue;
    }
    const bool send = group[i].kind == Kind::kSend;
    transfer.sequence = send ? transfer.link->sends++ : transfer.link->receives++;
    if (std::find(links.begin(), links.end(), transfer.link) == links.end()) {
      links.push_back(transfer.link);  // a failed one, too: its connection here may be open
    }
    if (transfer.link->failure != WireFailure::kNone) {
      End(&transfer, transfer.link->status);
    } else if (send) {
      PostSend(&transfer);
    } else {
      PostReceive(&transfer);
    }
  }
  return links;
}

void WireEngine::PostSend(Transfer* send) {
  Link* const link = send->link;
  const int64_t bytes = send->transfer->bytes;
  if (link->grants_ahead.empty()) {
    link->ungranted.push_back({bytes, false});
  } else {
    const int64_t expected = link->grants_ahead.front();
    link->grants_ahead.pop_front();
    if (expected != bytes) {
      Fail(link, WireFailure::kSizes,
           absl::StrCat("it expects ", expected, " bytes, but ", bytes, " are to be sent"));
      return;
    }
  }
  link->unassigned.push_back(send);
}

void WireEngine::PostReceive(Transfer* receive) {
  Link* const link = receive->link;
  const auto bytes = static_cast<uint64_t>(receive->transfer->bytes);
  link->stripes[0]->AddGrant(
      {.kind = WireFrame::Kind::kGrant, .sequence = receive->sequence, .total = bytes});
  receive->arrived.resize((bytes + kChunkBytes - 1) / kChunkBytes);
  const auto eager = link->eager.find(receive->sequence);
  if (eager == link->eager.end()) {
    link->receiving[receive->sequence] = receive;
    return;
  }
  if (eager->second.bytes.size() != bytes) {
    Fail(link, WireFailure::kSizes,
         absl::StrCat("it sent ", eager->second.bytes.size(), " bytes, but ", bytes,
                      " are expected"));
    return;
  }
  if (!eager->second.complete) {
    receive->arrived[0] = true;
    link->receiving[receive->sequence] = receive;  // OnDataEnd copies it
    return;
  }
  std::memcpy(receive->transfer->data, eager->second.bytes.data(), bytes);
  link->eager_bytes -= static_cast<int64_t>(bytes);
  link->eager.erase(eager);
  Move(receive, static_cast<int64_t>(bytes));
}

void WireEngine::EndLateTransfers(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  for (const Transfer& transfer : group_) {
    if (transfer.done) continue;
    const char* const what =
        transfer.transfer->kind == Kind::kSend ? "sending to" : "receiving from";
    Link* const link = transfer.link;
    if (link->failure != WireFailure::kNone) continue;
    Fail(link, WireFailure::kTimeout, "");
    link->status = absl::UnavailableError(absl::StrCat(
        what, " rank ", link->peer, " took longer than ", absl::FormatDuration(timeout)));
  }
}

absl::Status WireEngine::StatusOfGroup() {
  progress_ = nullptr;
  if (!aborted_.ok()) return aborted_;
  for (const Transfer& transfer : group_) {
    if (!transfer.status.ok()) return transfer.status;
  }
  return absl::OkStatus();
}

WireEngine::Chunk WireEngine::TakeChunk(Link* link, int stripe) {
  absl::MutexLock lock(&mutex_);
  if (link->failure != WireFailure::kNone || link->unassigned.empty()) return {};
  Transfer* const send = link->unassigned.front();
  const int64_t bytes = send->transfer->bytes;
  if (send->sequence >= link->grants) {
    if (stripe != 0 || bytes > kEagerBytes || link->eager_sent_bytes + bytes > kEagerCredit) {
      return {};
    }
    link->ungranted[send->sequence - link->grants].sent = true;
    link->eager_sent_bytes += bytes;
  }
  Chunk chunk;
  chunk.transfer = send;
  chunk.data = static_cast<const char*>(send->transfer->data) + send->assigned_bytes;
  const int64_t length = std::min<int64_t>(bytes - send->assigned_bytes, kChunkBytes);
  chunk.frame = {.kind = WireFrame::Kind::kData,
                 .length = static_cast<uint32_t>(length),
                 .sequence = send->sequence,
                 .offset = static_cast<uint64_t>(send->assigned_bytes),
                 .total = static_cast<uint64_t>(bytes)};
  send->assigned_bytes += length;
  if (send->assigned_bytes == bytes) link->unassigned.pop_front();
  return chunk;
}

void WireEngine::OnSent(const Chunk& chunk) {
  counters_->sent_bytes.fetch_add(chunk.frame.length, std::memory_order_relaxed);
  absl::MutexLock lock(&mutex_);
  Move(chunk.transfer, chunk.frame.length);
}

absl::Status WireEngine::OnGrant(Link* link, const WireFrame& frame) {
  {
    absl::MutexLock lock(&mutex_);
    if (link->failure != WireFailure::kNone) return link->status;
    if (frame.sequence != link->grants) {
      return absl::InvalidArgumentError(
          absl::StrCat("grant ", frame.sequence, " instead of ", link->grants));
    }
    const auto total = static_cast<int64_t>(frame.total);
    if (link->ungranted.empty()) {
      if (link->grants_ahead.size() >= kMaxGrantsAhead) {
        return absl::InvalidArgumentError(absl::StrCat(kMaxGrantsAhead, " grants ahead"));
      }
      link->grants_ahead.push_back(total);
    } else {
      const Link::Ungranted send = link->ungranted.front();
      link->ungranted.pop_front();
      if (send.bytes != total) {
        return absl::FailedPreconditionError(
            absl::StrCat("it expects ", total, " bytes, but ", send.bytes, " are to be sent"));
      }
      if (send.sent) link->eager_sent_bytes -= total;
    }
    ++link->grants;
  }
  // The connection that read the grant writes next.
  WakeHelpers(link);
  return absl::OkStatus();
}

absl::StatusOr<char*> WireEngine::OnData(Link* link, int stripe, const WireFrame& frame) {
  absl::MutexLock lock(&mutex_);
  if (link->failure != WireFailure::kNone) return link->status;
  const auto total = static_cast<int64_t>(frame.total);
  const auto found = link->receiving.find(frame.sequence);
  if (found != link->receiving.end()) {
    Transfer* const receive = found->second;
    if (receive->transfer->bytes != total) {
      return absl::FailedPreconditionError(absl::StrCat("it sent ", total, " bytes, but ",
                                                        receive->transfer->bytes, " are expected"));
    }
    const uint64_t chunk = frame.offset / kChunkBytes;
    if (receive->arrived[chunk]) {
      return absl::InvalidArgumentError(absl::StrCat("chunk ", chunk, " came twice"));
    }
    receive->arrived[chunk] = true;
    return static_cast<char*>(receive->transfer->data) + frame.offset;
  }
  if (stripe != 0 || frame.sequence < link->receives || total > kEagerBytes ||
      link->eager_bytes + total > kEagerCredit || link->eager.count(frame.sequence) > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(total, " bytes of transfer ", frame.sequence, " exceed what it may send"));
  }
  Link::Eager& eager = link->eager[frame.sequence];
  eager.bytes.resize(frame.total);
  link->eager_bytes += total;
  return eager.bytes.data();
}

absl::Status WireEngine::OnDataEnd(Link* link, const WireFrame& frame) {
  counters_->received_bytes.fetch_add(frame.length, std::memory_order_relaxed);
  absl::MutexLock lock(&mutex_);
  if (link->failure != WireFailure::kNone) return link->status;
  const auto eager = link->eager.find(frame.sequence);
  const auto found = link->receiving.find(frame.sequence);
  if (eager != link->eager.end()) {
    eager->second.complete = true;
    if (found == link->receiving.end()) return absl::OkStatus();
    // Its receive was posted while it arrived.
    std::memcpy(found->second->transfer->data, eager->second.bytes.data(), frame.length);
    link->eager_bytes -= static_cast<int64_t>(frame.length);
    link->eager.erase(eager);
  }
  Transfer* const receive = found->second;
  const bool complete = receive->moved_bytes + frame.length == frame.total;
  if (complete) link->receiving.erase(found);
  Move(receive, frame.length);
  return absl::OkStatus();
}

void WireEngine::Move(Transfer* transfer, int64_t bytes) {
  const int64_t before = transfer->moved_bytes;
  transfer->moved_bytes += bytes;
  const bool complete = transfer->moved_bytes == transfer->transfer->bytes;
  // A multiple of kProgressBytes at the very end counts once.
  int64_t steps = transfer->moved_bytes / kProgressBytes - before / kProgressBytes;
  if (complete && transfer->moved_bytes % kProgressBytes != 0) ++steps;
  progress_->fetch_add(steps, std::memory_order_relaxed);
  if (complete) End(transfer, absl::OkStatus());
}

void WireEngine::End(Transfer* transfer, absl::Status status) {
  transfer->done = true;
  transfer->status = std::move(status);
  if (--unfinished_ == 0 && std::this_thread::get_id() != runner_) loops_[0]->Wake();
}

void WireEngine::Fail(Link* link, WireFailure failure, const std::string& why) {
  if (link->failure != WireFailure::kNone) return;
  link->failure = failure;
  link->status = absl::UnavailableError(absl::StrCat("lost rank ", link->peer, ": ", why));
  link->unassigned.clear();
  link->receiving.clear();
  counters_->lost_peers[static_cast<size_t>(failure)].fetch_add(1, std::memory_order_relaxed);
  WakeAll();
}

void WireEngine::FailWith(Link* link, const WireStream::Result& result) {
  absl::MutexLock lock(&mutex_);
  Fail(link, result.failure, result.why);
}

void WireEngine::OnClosed(Link* link) {
  counters_->connections.fetch_sub(1, std::memory_order_relaxed);
  if (--link->open > 0) return;
  for (Transfer& transfer : group_) {
    if (transfer.link == link && !transfer.done) End(&transfer, link->status);
  }
}

void WireEngine::WakeAll() {
  for (const auto& loop : loops_) loop->Wake();
}

void WireEngine::WakeHelpers(Link* link) {
  size_t helpers = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (link->unassigned.empty()) return;
    const Transfer& send = *link->unassigned.front();
    if (send.sequence >= link->grants) return;
    const auto remaining = static_cast<uint64_t>(send.transfer->bytes - send.assigned_bytes);
    helpers = (remaining - 1) / kChunkBytes;  // the caller's connection takes one chunk
  }
  const size_t loops = std::min(helpers + 1, link->stripes.size());
  for (size_t i = 1; i < loops; ++i) loops_[i]->Wake();
}

void WireEngine::Abort(const std::string& reason) {
  absl::MutexLock lock(&mutex_);
  if (!aborted_.ok()) return;
  aborted_ = absl::UnavailableError(absl::StrCat("ring aborted: ", reason));
  for (const auto& link : links_) {
    if (link == nullptr) continue;
    if (link->failure == WireFailure::kNone) {
      // Not a loss of the peer, so it is not counted.
      link->failure = WireFailure::kClosed;
      link->status = aborted_;
      link->unassigned.clear();
      link->receiving.clear();
    }
    // Peers learn of it even if no Run is in progress here.
    for (const auto& stripe : link->stripes) stripe->Shutdown();
  }
  WakeAll();
}

}  // namespace ringattn::worker
