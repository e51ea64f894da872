#include "worker/region/region_listener.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/testing/wall_clock.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kBytes = 1 << 16;
const std::string kToken(kAttachTokenBytes, 't');

ScopedDescriptor MakeMemfd(bool sealed = true) {
  ScopedDescriptor fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(fd.get(), kBytes), 0);
  EXPECT_EQ(fallocate(fd.get(), 0, 0, kBytes), 0);
  if (sealed) {
    EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL), 0);
  }
  return fd;
}

int OpenDescriptorsNow() {
  int count = 0;
  for (int fd = 0; fd < 4096; ++fd) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

class RegionListenerTest : public testing::Test {
 protected:
  void SetUp() override { Start({geteuid()}); }
  void TearDown() override {
    listener_.reset();
    rmdir(folder_.c_str());
  }

  void Start(std::vector<uid_t> uids) {
    listener_.reset();
    if (folder_.empty()) {
      char name[] = "/tmp/region_listener_XXXXXX";
      folder_ = mkdtemp(name);
    }
    RegionListenerOptions options;
    options.socket_path = absl::StrCat(folder_, "/w.sock");
    options.uids = std::move(uids);
    options.attach_timeout = absl::Milliseconds(1500);
    options.token_wait = absl::Milliseconds(500);
    options.max_unattached = 3;
    options.max_regions = 8;
    auto started = RegionListener::Start(
        options, {.on_attached = [this](const auto&, size_t regions) { attached_ += regions > 0; },
                  .on_gone = [this](const auto&, size_t) { ++gone_; },
                  .on_refused = [this](AttachCode code) { refused_ = code; }});
    ASSERT_TRUE(started.ok()) << started.status();
    listener_ = *std::move(started);
  }

  ScopedDescriptor Connect() {
    auto socket = ConnectLocally(absl::StrCat(folder_, "/w.sock"));
    EXPECT_TRUE(socket.ok()) << socket.status();
    return *std::move(socket);
  }

  void Expect(const std::string& id = "region", absl::Duration valid = absl::Seconds(10)) {
    listener_->Expect(id, kToken, kBytes, absl::Now() + valid);
  }

  static WorkerAnswer Read(const ScopedDescriptor& socket) {
    const auto received = ReceiveMessage(socket.get(), kMaxAttachDatagramBytes, 0);
    const auto answer = ReadWorkerAnswer(received.ok() ? received->bytes : std::string());
    EXPECT_TRUE(answer.has_value());
    return answer.value_or(WorkerAnswer{AttachCode::kNotUnderstood, "no answer"});
  }

  static bool IsClosed(const ScopedDescriptor& socket) {
    const auto received = ReceiveMessage(socket.get(), 16, 0);
    return !received.ok() || received->bytes.empty();
  }

  static WorkerAnswer Show(const ScopedDescriptor& socket, int fd,
                           const std::string& token = kToken) {
    EXPECT_TRUE(SendMessage(socket.get(), Encode(AttachMessage{token}), fd, 0).ok());
    return Read(socket);
  }

  template <typename Predicate>
  static bool Await(const Predicate& predicate) {
    for (int i = 0; i < 2000 && !predicate(); ++i) absl::SleepFor(absl::Milliseconds(5));
    return predicate();
  }

  std::string folder_;
  std::atomic<int> attached_{0}, gone_{0};
  std::atomic<AttachCode> refused_{AttachCode::kAttached};
  std::unique_ptr<RegionListener> listener_;
};

TEST_F(RegionListenerTest, RegionLivesAsLongAsItsSocket) {
  Expect();
  ScopedDescriptor socket = Connect();
  {
    const ScopedDescriptor memfd = MakeMemfd();
    ASSERT_EQ(pwrite(memfd.get(), "x", 1, kBytes - 1), 1);
    EXPECT_EQ(Show(socket, memfd.get()).code, AttachCode::kAttached);
  }
  const std::shared_ptr<Region> region = listener_->Find("region");
  ASSERT_NE(region, nullptr);
  EXPECT_EQ(region->data()[kBytes - 1], 'x');
  EXPECT_EQ(attached_, 1);
  socket.Close();
  EXPECT_TRUE(Await([&] { return gone_ == 1; }));
  EXPECT_EQ(listener_->Find("region"), nullptr);
  EXPECT_TRUE(region->released());
  EXPECT_EQ(region->data()[kBytes - 1], 'x');  // stays mapped while it is referenced
}

TEST_F(RegionListenerTest, TokenIsValidForOneUse) {
  Expect();
  const ScopedDescriptor memfd = MakeMemfd();
  const ScopedDescriptor first = Connect(), second = Connect();
  EXPECT_EQ(Show(first, memfd.get()).code, AttachCode::kAttached);
  EXPECT_EQ(Show(second, memfd.get()).code, AttachCode::kNoSuchToken);
  EXPECT_TRUE(IsClosed(second));
  EXPECT_EQ(refused_, AttachCode::kNoSuchToken);
}

// One client that requests many tokens does not use up the limit for others.
TEST_F(RegionListenerTest, OnlyNewestTokenOfRegionIsValid) {
  const absl::Time later = absl::Now() + absl::Seconds(60);
  std::string token;
  for (int i = 0; i < 5000; ++i) {
    token = absl::StrCat(100'000 + i, std::string(kAttachTokenBytes - 6, 'x'));
    listener_->Expect("greedy", token, kBytes, later);
  }
  Expect();
  const ScopedDescriptor memfd = MakeMemfd();
  const ScopedDescriptor first = Connect(), second = Connect();
  EXPECT_EQ(Show(first, memfd.get()).code, AttachCode::kAttached);
  EXPECT_EQ(Show(second, memfd.get(), token).code, AttachCode::kAttached);  // the newest token
}

TEST_F(RegionListenerTest, BadDescriptorSpendsToken) {
  Expect();
  const ScopedDescriptor first = Connect(), second = Connect();
  EXPECT_EQ(Show(first, MakeMemfd(/*sealed=*/false).get()).code, AttachCode::kDescriptorRefused);
  EXPECT_EQ(Show(second, MakeMemfd().get()).code, AttachCode::kNoSuchToken);
}

TEST_F(RegionListenerTest, RejectsUnknownAndExpiredTokens) {
  const ScopedDescriptor memfd = MakeMemfd();
  EXPECT_EQ(Show(Connect(), memfd.get()).code, AttachCode::kNoSuchToken);
  Expect("region", -absl::Seconds(1));
  EXPECT_EQ(Show(Connect(), memfd.get()).code, AttachCode::kNoSuchToken);
}

TEST_F(RegionListenerTest, ClientMayBeFasterThanCoordinator) {
  const ScopedDescriptor socket = Connect();
  const ScopedDescriptor memfd = MakeMemfd();
  ASSERT_TRUE(SendMessage(socket.get(), Encode(AttachMessage{kToken}), memfd.get(), 0).ok());
  absl::SleepFor(absl::Milliseconds(20));
  Expect();
  EXPECT_EQ(Read(socket).code, AttachCode::kAttached);
}

TEST_F(RegionListenerTest, RejectsInvalidMessages) {
  Expect();
  const ScopedDescriptor memfd = MakeMemfd();
  const ScopedDescriptor without = Connect();
  EXPECT_EQ(Show(without, -1).code, AttachCode::kNotUnderstood);
  const ScopedDescriptor garbage = Connect();
  ASSERT_TRUE(SendMessage(garbage.get(), "garbage", memfd.get(), 0).ok());
  EXPECT_EQ(Read(garbage).code, AttachCode::kNotUnderstood);
  const ScopedDescriptor long_one = Connect();
  ASSERT_TRUE(SendMessage(long_one.get(), std::string(5000, 'x'), -1, 0).ok());
  EXPECT_EQ(Read(long_one).code, AttachCode::kNotUnderstood);
  const ScopedDescriptor fence = Connect();
  ASSERT_TRUE(SendMessage(fence.get(), Encode(FenceMessage{1}), -1, 0).ok());
  EXPECT_EQ(Read(fence).code, AttachCode::kNotUnderstood);
  EXPECT_TRUE(IsClosed(fence));
  // None of them spent the token.
  EXPECT_EQ(Show(Connect(), memfd.get()).code, AttachCode::kAttached);
}

// A client of version 1 is answered in version 1, others in the current version.
TEST_F(RegionListenerTest, AnswersOtherVersions) {
  Expect();
  const ScopedDescriptor memfd = MakeMemfd();
  for (const char version : {1, 3}) {
    std::string message = Encode(AttachMessage{kToken});
    message[0] = version;
    const ScopedDescriptor socket = Connect();
    ASSERT_TRUE(SendMessage(socket.get(), message, memfd.get(), 0).ok());
    const auto received = ReceiveMessage(socket.get(), kMaxAttachDatagramBytes, 0);
    ASSERT_TRUE(received.ok());
    const std::string detail =
        absl::StrCat("version ", static_cast<int>(version),
                     " of the attach protocol is not supported; this worker uses version 2");
    EXPECT_EQ(received->bytes,
              std::string({version == 1 ? '\1' : '\2', 0, 0, 0, 1, 0, 0, 0}) + detail);
    EXPECT_TRUE(IsClosed(socket));
  }
  EXPECT_EQ(refused_, AttachCode::kNotUnderstood);
  EXPECT_EQ(Show(Connect(), memfd.get()).code, AttachCode::kAttached);
}

// This worker has no GPU.
TEST_F(RegionListenerTest, RejectsUnsupportedMemoryByName) {
  Expect();
  const ScopedDescriptor memfd = MakeMemfd();
  std::string unknown = Encode(AttachMessage{kToken});
  unknown[24] = 9;
  const ScopedDescriptor socket = Connect();
  ASSERT_TRUE(SendMessage(socket.get(), unknown, memfd.get(), 0).ok());
  WorkerAnswer answer = Read(socket);
  EXPECT_EQ(answer.code, AttachCode::kKindRefused);
  EXPECT_EQ(answer.detail, "the memory's kind is 9, must be 1 (host memory), 2 or 3 (CUDA memory)");
  EXPECT_TRUE(IsClosed(socket));
  AttachMessage cuda{kToken, MemoryKind::kCudaVmm};
  cuda.cuda = {.device_uuid = std::string(kDeviceUuidBytes, 'u'), .bytes = kBytes};
  const ScopedDescriptor second = Connect();
  ASSERT_TRUE(SendMessage(second.get(), Encode(cuda), memfd.get(), 0).ok());
  answer = Read(second);
  EXPECT_EQ(answer.code, AttachCode::kKindRefused);
  EXPECT_EQ(answer.detail,
            "this worker does not accept CUDA memory (--local_memory, or it has no GPU)");
  EXPECT_EQ(refused_, AttachCode::kKindRefused);
  EXPECT_EQ(Show(Connect(), memfd.get()).code, AttachCode::kNoSuchToken);
}

TEST_F(RegionListenerTest, RejectsOtherUsers) {
  Start({geteuid() + 1});
  Expect();
  const ScopedDescriptor socket = Connect();
  EXPECT_EQ(Read(socket).code, AttachCode::kForeignUser);
  EXPECT_TRUE(IsClosed(socket));
}

TEST_F(RegionListenerTest, AnswersFence) {
  Expect();
  const ScopedDescriptor socket = Connect();
  ASSERT_EQ(Show(socket, MakeMemfd().get()).code, AttachCode::kAttached);
  ASSERT_TRUE(SendMessage(socket.get(), Encode(FenceMessage{42}), -1, 0).ok());
  const WorkerAnswer answer = Read(socket);
  EXPECT_EQ(answer.code, AttachCode::kFenced);
  EXPECT_EQ(answer.number, 42u);
  EXPECT_FALSE(listener_->Find("region")->BeginWrite(42));
  EXPECT_TRUE(listener_->Find("region")->BeginWrite(43));
  listener_->Find("region")->EndWrite(43);
}

TEST_F(RegionListenerTest, ClosesIdleConnections) {
  const ScopedDescriptor idle = Connect();
  EXPECT_TRUE(IsClosed(idle));
  // One more than may wait: the oldest is evicted.
  std::vector<ScopedDescriptor> many;
  for (int i = 0; i < 5; ++i) many.push_back(Connect());
  EXPECT_TRUE(IsClosed(many[0]));
}

TEST_F(RegionListenerTest, AWallClockThatIsSetBackProlongsNothing) {
  const ScopedDescriptor idle = Connect();
  SetWallClockBack(absl::Hours(1));
  pollfd entry = {idle.get(), POLLIN, 0};
  EXPECT_EQ(poll(&entry, 1, /*timeout ms=*/20'000), 1) << "the idle connection stays open";
  SetWallClockBack(absl::ZeroDuration());
}

TEST_F(RegionListenerTest, ForgetDropsTheToken) {
  Expect();
  listener_->Forget("region");
  const ScopedDescriptor memfd = MakeMemfd(), socket = Connect();
  EXPECT_EQ(Show(socket, memfd.get()).code, AttachCode::kNoSuchToken);
}

TEST_F(RegionListenerTest, ForgetClosesConnections) {
  Expect();
  const ScopedDescriptor socket = Connect();
  ASSERT_EQ(Show(socket, MakeMemfd().get()).code, AttachCode::kAttached);
  listener_->Forget("region");
  EXPECT_EQ(listener_->Find("region"), nullptr);
  EXPECT_TRUE(IsClosed(socket));
  Expect();
  listener_->ForgetAll();
  EXPECT_EQ(Show(Connect(), MakeMemfd().get()).code, AttachCode::kNoSuchToken);
}

TEST_F(RegionListenerTest, AttachingLeaksNothing) {
  const auto once = [&] {
    Expect();
    ScopedDescriptor socket = Connect();
    ASSERT_EQ(Show(socket, MakeMemfd().get()).code, AttachCode::kAttached);
    socket.Close();
    ASSERT_TRUE(Await([&] { return listener_->regions() == 0; }));
  };
  once();
  ASSERT_TRUE(Await([&] { return gone_ == 1; }));
  const int before = OpenDescriptorsNow();
  for (int i = 0; i < 300; ++i) once();
  EXPECT_TRUE(Await([&] { return gone_ == 301 && OpenDescriptorsNow() <= before; }));
}

TEST_F(RegionListenerTest, StopRejectsClientsAndCallsNoHooks) {
  Expect();
  const ScopedDescriptor socket = Connect();
  ASSERT_EQ(Show(socket, MakeMemfd().get()).code, AttachCode::kAttached);
  const std::shared_ptr<Region> region = listener_->Find("region");
  listener_->Stop();
  EXPECT_TRUE(region->released());
  EXPECT_EQ(gone_, 0);
  EXPECT_TRUE(IsClosed(socket));
  EXPECT_FALSE(ConnectLocally(absl::StrCat(folder_, "/w.sock")).ok());
  // Messages of the coordinator that arrive late.
  Expect();
  listener_->Forget("region");
  listener_->ForgetAll();
  EXPECT_EQ(listener_->Find("region"), nullptr);
  EXPECT_EQ(listener_->regions(), 0u);
  listener_->Stop();
}

TEST_F(RegionListenerTest, ReplacesSocketOfDeadWorker) {
  const std::string path = absl::StrCat(folder_, "/w.sock");
  listener_.reset();
  { ASSERT_TRUE(ListenLocally(path, 0600, 1).ok()); }  // its file stays
  ASSERT_EQ(access(path.c_str(), F_OK), 0);
  Start({geteuid()});
  Connect();
  // But a socket that is in use is not replaced.
  RegionListenerOptions taken;
  taken.socket_path = path;
  taken.uids = {geteuid()};
  EXPECT_FALSE(RegionListener::Start(taken, {}).ok());
}

}  // namespace
}  // namespace ringattn::worker
