#include "worker/region/local_memory.h"

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/local_memory/attach_protocol.h"
#include "common/local_memory/local_socket.h"
#include "common/wire/durations.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/testing/copied_operation.h"

namespace ringattn::worker {
namespace {

using ::testing::HasSubstr;

class LocalMemoryTest : public testing::Test {
 protected:
  LocalMemoryTest() {
    char name[] = "/tmp/local_memory_XXXXXX";
    folder_ = mkdtemp(name);
    Start();
  }
  ~LocalMemoryTest() override {
    memory_.reset();
    rmdir(folder_.c_str());
  }

  std::string path() const { return LocalSocketPath(folder_, "worker/1"); }

  void Start() {
    memory_.reset();
    LocalMemoryHooks hooks;
    hooks.send = [this](v1::JoinRequest message) {
      const absl::MutexLock lock(&mutex_);
      sent_.push_back(std::move(message));
    };
    hooks.on_received_bytes = [this](int64_t bytes) { received_ += bytes; };
    hooks.on_sent_bytes = [](int64_t) {};
    hooks.on_downloaded = [](absl::Duration) {};
    hooks.on_regions = [this](size_t regions) { regions_ = static_cast<int>(regions); };
    hooks.on_refused = [this](AttachCode) { ++refused_; };
    auto started = LocalMemory::Start({.socket_path = path(),
                                       .uids = {geteuid()},
                                       .copy_threads = 2,
                                       .report_interval = absl::Milliseconds(5)},
                                      std::move(hooks));
    ASSERT_TRUE(started.ok()) << started.status();
    memory_ = *std::move(started);
  }

  void Expect(const std::string& id, int64_t bytes, char token = 't') {
    v1::ExpectRegion expect;
    expect.set_region_id(id);
    expect.set_token(std::string(kAttachTokenBytes, token));
    expect.set_bytes(bytes);
    SetDuration(absl::Seconds(10), expect.mutable_valid_for());
    memory_->Expect(expect);
  }
  // Returns the client's end of the region's socket.
  ScopedDescriptor Attach(int fd, char token = 't') {
    auto socket = ConnectLocally(path());
    EXPECT_TRUE(socket.ok()) << socket.status();
    const AttachMessage message{std::string(kAttachTokenBytes, token)};
    EXPECT_TRUE(SendMessage(socket->get(), Encode(message), fd, 0).ok());
    const auto received = ReceiveMessage(socket->get(), kMaxAttachDatagramBytes, 0);
    const auto answer = ReadWorkerAnswer(received.ok() ? received->bytes : "");
    EXPECT_TRUE(answer && answer->code == AttachCode::kAttached);
    return *std::move(socket);
  }

  // Returns the number of messages for which `is_it` holds.
  template <typename Is>
  int Count(const Is& is_it) {
    const absl::MutexLock lock(&mutex_);
    return static_cast<int>(std::count_if(sent_.begin(), sent_.end(), is_it));
  }
  int Changes(bool attached) {
    return Count([=](const v1::JoinRequest& m) {
      return m.has_region_changed() && m.region_changed().attached() == attached;
    });
  }
  template <typename Is>
  v1::TransferProgress Progress(const Is& is_it) {
    v1::TransferProgress found;
    EXPECT_TRUE(Await([&] {
      const absl::MutexLock lock(&mutex_);
      for (const v1::JoinRequest& message : sent_) {
        if (!message.has_transfer_progress() || !is_it(message.transfer_progress())) continue;
        found = message.transfer_progress();
        return true;
      }
      return false;
    }));
    return found;
  }

  std::string folder_;
  absl::Mutex mutex_;
  std::vector<v1::JoinRequest> sent_;
  std::atomic<int64_t> received_{0};
  std::atomic<int> regions_{0}, refused_{0};
  std::unique_ptr<LocalMemory> memory_;
};

TEST_F(LocalMemoryTest, CopiesAndReportsOperation) {
  CopiedOperation copied(/*tokens=*/20'000);
  const ScopedDescriptor memfd = copied.MakeMemfd();
  const auto mapped = *Region::Map("mine", memfd.get(), copied.region_bytes());
  copied.Fill(mapped->data());
  Expect("region", copied.region_bytes());
  const ScopedDescriptor socket = Attach(memfd.get());
  EXPECT_TRUE(Await([&] { return Changes(true) == 1 && regions_ == 1; }));
  memory_->Begin(copied.operation(), copied.reserve());
  EXPECT_TRUE(Await([&] { return Count([](const auto& m) { return m.has_uploaded(); }) == 1; }));
  EXPECT_TRUE(copied.HasArrived(TensorId::kV, mapped->data()));
  const int64_t bytes = 3 * BytesOf(copied.spec(), TensorId::kQ);
  EXPECT_EQ(received_, bytes);
  const auto progress = Progress([&](const auto& p) { return p.received() == bytes; });
  EXPECT_EQ(progress.operation_id(), "7-1");
  EXPECT_EQ(progress.generation(), 7u);
  copied.Compute();
  EXPECT_TRUE(Await([&] { return Count([](const auto& m) { return m.has_delivered(); }) == 1; }));
  EXPECT_TRUE(copied.HasLeft(TensorId::kOut, mapped->data()));
  copied.operation()->End(absl::CancelledError("released"));
  copied.Drop();
  EXPECT_TRUE(Await([&] { return copied.destroyed(); }));
}

TEST_F(LocalMemoryTest, RegionEndFailsItsTransfers) {
  CopiedOperation copied;
  const ScopedDescriptor memfd = copied.MakeMemfd();
  Expect("region", copied.region_bytes());
  ScopedDescriptor socket = Attach(memfd.get());
  memory_->Begin(copied.operation(), copied.reserve());
  EXPECT_TRUE(Await([&] { return Count([](const auto& m) { return m.has_uploaded(); }) == 1; }));
  socket.Close();
  Progress([](const auto& p) { return p.region_released() && p.failure().empty(); });
  EXPECT_TRUE(Await([&] { return Changes(false) == 1 && regions_ == 0; }));
  copied.operation()->End(absl::CancelledError("released"));
  copied.Drop();
  EXPECT_TRUE(Await([&] { return copied.destroyed(); }));
}

TEST_F(LocalMemoryTest, ReportsTransferThatCannotStart) {
  CopiedOperation copied;
  memory_->Begin(copied.operation(), copied.reserve());
  Progress([](const auto& p) { return p.region_released(); });  // no region is attached
  CopiedOperation nowhere;
  nowhere.reserve().clear_places();
  memory_->Begin(nowhere.operation(), nowhere.reserve());
  const auto failed = Progress([](const auto& p) { return !p.failure().empty(); });
  EXPECT_THAT(failed.failure(), HasSubstr("has no location in a region"));
}

TEST_F(LocalMemoryTest, ForgetReleasesRegions) {
  CopiedOperation sized;
  const ScopedDescriptor memfd = sized.MakeMemfd();
  Expect("first", sized.region_bytes(), 'a');
  Expect("second", sized.region_bytes(), 'b');
  const ScopedDescriptor first = Attach(memfd.get(), 'a'), second = Attach(memfd.get(), 'b');
  EXPECT_TRUE(Await([&] { return regions_ == 2; }));
  v1::ForgetRegion forget;
  forget.set_region_id("first");
  memory_->Forget(forget);
  EXPECT_TRUE(Await([&] { return Changes(false) == 1 && regions_ == 1; }));
  memory_->ForgetAll();
  EXPECT_TRUE(Await([&] { return Changes(false) == 2 && regions_ == 0; }));
}

TEST_F(LocalMemoryTest, StopEndsAllActivity) {
  CopiedOperation copied;
  const ScopedDescriptor memfd = copied.MakeMemfd();
  Expect("region", copied.region_bytes());
  const ScopedDescriptor socket = Attach(memfd.get());
  EXPECT_TRUE(Await([&] { return Changes(true) == 1; }));
  memory_->Stop();
  EXPECT_EQ(Changes(false), 0);
  // Messages that arrive late.
  Expect("late", 4096);
  memory_->Forget({});
  memory_->ForgetAll();
  memory_->Begin(copied.operation(), copied.reserve());
  Progress([](const auto& p) { return p.region_released(); });
  EXPECT_FALSE(ConnectLocally(path()).ok());
  memory_->Stop();
}

// Clients connect while the listener starts and while it stops.
TEST_F(LocalMemoryTest, ClientsMayConnectAtAnyTime) {
  CopiedOperation sized;
  const ScopedDescriptor memfd = sized.MakeMemfd();
  std::atomic<bool> over{false};
  std::thread client([&] {
    while (!over) {
      auto socket = ConnectLocally(path());
      if (!socket.ok()) continue;
      const AttachMessage message{std::string(kAttachTokenBytes, 't')};
      (void)SendMessage(socket->get(), Encode(message), memfd.get(), 0);
      (void)ReceiveMessage(socket->get(), kMaxAttachDatagramBytes, MSG_DONTWAIT);
    }
  });
  for (int i = 0; i < 30; ++i) {
    Start();
    Expect("region", sized.region_bytes());
    if (i % 2 == 0) absl::SleepFor(absl::Milliseconds(3));
  }
  over = true;
  client.join();
}

TEST_F(LocalMemoryTest, RejectsUnusablePath) {
  LocalMemoryHooks hooks;
  EXPECT_FALSE(LocalMemory::Start({.socket_path = "/nowhere/at/all.sock"}, hooks).ok());
  EXPECT_EQ(LocalSocketPath("/run", "a b/c"), "/run/a_b_c.sock");
}

}  // namespace
}  // namespace ringattn::worker
