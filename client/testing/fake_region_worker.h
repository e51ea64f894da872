// A worker's end of regions for tests of the client. It accepts memory over a Unix socket and
// answers fences, or not. It speaks the protocol of common/local_memory on its own thread.
#ifndef RINGATTN_CLIENT_TESTING_FAKE_REGION_WORKER_H_
#define RINGATTN_CLIENT_TESTING_FAKE_REGION_WORKER_H_

#include <poll.h>
#include <sys/socket.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/local_memory/attach_protocol.h"
#include "common/local_memory/local_socket.h"
#include "common/local_memory/scoped_descriptor.h"
#include "gtest/gtest.h"
#include "ringattn/v1/local_memory.pb.h"

namespace ringattn::client {

// Thread safe.
class FakeRegionWorker {
 public:
  explicit FakeRegionWorker(std::string name) : name_(std::move(name)) {
    char folder[] = "/tmp/fake_region_worker_XXXXXX";
    folder_ = mkdtemp(folder);
    Listen();
    thread_ = std::thread([this] { Run(); });
  }
  ~FakeRegionWorker() {
    {
      const absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    thread_.join();
    unlink(path().c_str());
    rmdir(folder_.c_str());
  }

  const std::string& name() const { return name_; }

  // How the coordinator describes this worker to a client that lacks it.
  v1::AttachPoint Point() const {
    v1::AttachPoint point;
    point.set_worker(name_);
    point.set_socket_path(path());
    point.set_token(std::string(kAttachTokenBytes, 't'));
    point.set_host_id(HostId());
    return point;
  }

  // --- Behaviour from now on.
  void RefuseWith(AttachCode code) {
    const absl::MutexLock lock(&mutex_);
    attach_code_ = code;
  }
  // Sends this code to whoever connects, without reading, and closes.
  void RefuseUnheard(AttachCode code) {
    const absl::MutexLock lock(&mutex_);
    unheard_code_ = code;
  }
  void AnswerFences(bool answers) {
    const absl::MutexLock lock(&mutex_);
    answers_fences_ = answers;
  }
  // Drops all attachments, as a restart does.
  void DropRegions() {
    const absl::MutexLock lock(&mutex_);
    attached_.clear();
  }

  // --- What it has seen.
  bool has_region() const {
    const absl::MutexLock lock(&mutex_);
    return !attached_.empty();
  }
  int attaches() const {
    const absl::MutexLock lock(&mutex_);
    return attaches_;
  }
  std::vector<uint64_t> fences() const {
    const absl::MutexLock lock(&mutex_);
    return fences_;
  }

 private:
  std::string path() const { return absl::StrCat(folder_, "/w.sock"); }

  void Listen() {
    auto listener = ListenLocally(path(), 0600, 8);
    EXPECT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
  }

  void Run() {
    while (true) {
      pollfd polled = {listener_.get(), POLLIN, 0};
      poll(&polled, 1, 2);
      const absl::MutexLock lock(&mutex_);
      if (stopping_) return;
      if (polled.revents != 0) {
        ScopedDescriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (unheard_code_) {
          (void)SendMessage(socket.get(), Encode(WorkerAnswer{*unheard_code_, "as it was told", 0}),
                            -1, 0);
        } else {
          coming_.push_back(std::move(socket));
        }
      }
      for (size_t i = coming_.size(); i-- > 0;) ServeComing(i);
      for (size_t i = attached_.size(); i-- > 0;) ServeAttached(i);
    }
  }

  void ServeComing(size_t i) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto received = ReceiveMessage(coming_[i].get(), kMaxAttachDatagramBytes, MSG_DONTWAIT);
    if (absl::IsUnavailable(received.status())) return;
    const auto message =
        received.ok() ? ReadClientMessage(received->bytes) : std::optional<ClientMessage>();
    ScopedDescriptor socket = std::move(coming_[i]);
    coming_.erase(coming_.begin() + static_cast<ptrdiff_t>(i));
    if (!message || !std::holds_alternative<AttachMessage>(*message)) return;
    EXPECT_EQ(received->descriptors.size(), 1u);
    ++attaches_;
    (void)SendMessage(socket.get(), Encode(WorkerAnswer{attach_code_, "as it was told", 0}), -1, 0);
    if (attach_code_ == AttachCode::kAttached) attached_.push_back(std::move(socket));
  }

  void ServeAttached(size_t i) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto received = ReceiveMessage(attached_[i].get(), kMaxAttachDatagramBytes, MSG_DONTWAIT);
    if (absl::IsUnavailable(received.status())) return;
    if (!received.ok() || received->bytes.empty()) {
      attached_.erase(attached_.begin() + static_cast<ptrdiff_t>(i));
      return;
    }
    const auto message = ReadClientMessage(received->bytes);
    ASSERT_TRUE(message && std::holds_alternative<FenceMessage>(*message));
    const uint64_t number = std::get<FenceMessage>(*message).number;
    fences_.push_back(number);
    if (!answers_fences_) return;
    (void)SendMessage(attached_[i].get(), Encode(WorkerAnswer{AttachCode::kFenced, "", number}), -1,
                      0);
  }

  const std::string name_;
  std::string folder_;
  ScopedDescriptor listener_;
  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  AttachCode attach_code_ ABSL_GUARDED_BY(mutex_) = AttachCode::kAttached;
  std::optional<AttachCode> unheard_code_ ABSL_GUARDED_BY(mutex_);
  bool answers_fences_ ABSL_GUARDED_BY(mutex_) = true;
  int attaches_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<uint64_t> fences_ ABSL_GUARDED_BY(mutex_);
  std::vector<ScopedDescriptor> coming_ ABSL_GUARDED_BY(mutex_);
  std::vector<ScopedDescriptor> attached_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_TESTING_FAKE_REGION_WORKER_H_
