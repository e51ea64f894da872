#include "worker/comm/wire/wire_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

namespace ringattn::worker {
namespace {

// Returns epoll's timeout: -1 for no limit.
int TimeoutMs(absl::Duration patience) {
  if (patience == absl::InfiniteDuration()) return -1;
  if (patience <= absl::ZeroDuration()) return 0;
  return static_cast<int>(absl::ToInt64Milliseconds(std::min(patience, absl::Hours(1)))) + 1;
}

}  // namespace

WireLoop::WireLoop()
    : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event event{};
  event.events = EPOLLIN;
  // Without both, the process has no descriptors left and cannot serve.
  if (epoll_ < 0 || wake_ < 0 || epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) != 0) {
    std::abort();
  }
}

WireLoop::~WireLoop() {
  close(epoll_);
  close(wake_);
}

void WireLoop::Add(WireConnection* connection) {
  // What followed the handshake may have been read with it.
  entries_.push_back({.connection = connection, .rest = {.reads_more = true}});
  reads_more_ = true;
  Control(EPOLL_CTL_ADD, entries_.back(), entries_.size() - 1);
}

void WireLoop::Wake() {
  const uint64_t one = 1;
  (void)!write(wake_, &one, sizeof(one));
}

void WireLoop::Poll(absl::Duration patience) {
  const bool again = std::exchange(reads_more_, false);
  epoll_event events[64];
  const int count = epoll_wait(epoll_, events, 64, again ? 0 : TimeoutMs(patience));
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
  for (size_t i = 0; again && i < entries_.size(); ++i) {
    if (entries_[i].rest.reads_more) Work(i, true);
  }
  for (size_t i = 0; woken && i < entries_.size(); ++i) Work(i, entries_[i].rest.waits_memory);
}

void WireLoop::Push(const WirePeer* peer) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].connection->peer() == peer) Work(i, false);
  }
}

void WireLoop::CloseAll() {
  for (const Entry& entry : entries_) {
    if (entry.connection->open()) entry.connection->peer()->Close(entry.connection);
  }
}

void WireLoop::Control(int operation, const Entry& entry, size_t index) {
  epoll_event event{};
  if (!entry.rest.waits_memory) event.events |= EPOLLIN;
  if (entry.rest.wants_write) event.events |= EPOLLOUT;
  event.data.u64 = index + 1;  // 0: wake_
  if (epoll_ctl(epoll_, operation, entry.connection->fd(), &event) == 0) return;
  entry.connection->peer()->OnFailure(WireStream::Failed(errno));
}

void WireLoop::Work(size_t index, bool readable) {
  Entry& entry = entries_[index];
  if (!entry.connection->open()) return;
  WirePeer* const peer = entry.connection->peer();
  const WireConnection::Rest before = entry.rest;
  if (peer->failed() || !entry.connection->Work(readable, &entry.rest)) {
    entry.rest.reads_more = false;
    peer->Close(entry.connection);
    return;
  }
  reads_more_ |= entry.rest.reads_more;
  if (entry.rest.wants_write == before.wants_write &&
      entry.rest.waits_memory == before.waits_memory) {
    return;
  }
  Control(EPOLL_CTL_MOD, entry, index);
}

}  // namespace ringattn::worker
