// Clients' CUDA memory from the socket to the operation's buffers and back, on a GPU worker's
// device with a fake runtime and driver. Allocations are memfds, so the test can compare bytes.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/local_memory/attach_protocol.h"
#include "common/local_memory/local_socket.h"
#include "common/wire/durations.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/region/local_memory.h"
#include "worker/testing/copied_operation.h"
#include "worker/testing/fake_cuda/fake_cuda.h"
#include "worker/testing/fake_cuda/fake_vmm.h"
#include "worker/testing/fake_cuda/shared_allocation.h"

namespace ringattn::worker {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kAllocation = 8 * kMiB;
constexpr int64_t kRegionAt = 4096;  // offset in the allocation

int OpenDescriptors() {
  int count = 0;
  for (int fd = 0; fd < 4096; ++fd) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

class CudaRegionsTest : public testing::Test {
 protected:
  CudaRegionsTest() {
    char name[] = "/tmp/cuda_regions_XXXXXX";
    folder_ = mkdtemp(name);
    auto device = CudaDevice::Create({.device = 0, .pinned_pool_bytes = 32 * kMiB});
    EXPECT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    Start();
  }
  ~CudaRegionsTest() override {
    FakeVmm().hold_imports = false;
    Faults().hold_copies = false;
    memory_.reset();
    rmdir(folder_.c_str());
  }

  void Start(std::vector<uid_t> uids = {geteuid()}, int64_t max_imported_bytes = 3 * kAllocation) {
    memory_.reset();
    LocalMemoryHooks hooks;
    hooks.send = [this](v1::JoinRequest message) {
      const absl::MutexLock lock(&mutex_);
      sent_.push_back(std::move(message));
    };
    hooks.on_received_bytes = hooks.on_sent_bytes = [](int64_t) { ADD_FAILURE() << "host bytes"; };
    hooks.on_imported_in_bytes = [this](int64_t bytes) { in_ += bytes; };
    hooks.on_imported_out_bytes = [this](int64_t bytes) { out_ += bytes; };
    hooks.on_downloaded = [](absl::Duration) {};
    hooks.on_regions = [this](size_t regions) { regions_ = static_cast<int>(regions); };
    hooks.on_imported_bytes = [this](int64_t bytes) { imported_ = bytes; };
    hooks.on_refused = [this](AttachCode code) { refused_ = code; };
    auto started = LocalMemory::Start({.socket_path = absl::StrCat(folder_, "/w.sock"),
                                       .uids = std::move(uids),
                                       .device = device_.get(),
                                       .max_pinned_bytes = 1 << 30,
                                       .max_imported_bytes = max_imported_bytes,
                                       .report_interval = absl::Milliseconds(5)},
                                      std::move(hooks));
    ASSERT_TRUE(started.ok()) << started.status();
    memory_ = *std::move(started);
  }

  void Expect(const std::string& id, int64_t bytes, v1::RegionKind kind = v1::REGION_KIND_CUDA,
              char token = 't') {
    v1::ExpectRegion expect;
    expect.set_region_id(id);
    expect.set_token(std::string(kAttachTokenBytes, token));
    expect.set_bytes(bytes);
    expect.set_kind(kind);
    SetDuration(absl::Seconds(10), expect.mutable_valid_for());
    memory_->Expect(expect);
  }

  ScopedDescriptor Connect() {
    auto socket = ConnectLocally(absl::StrCat(folder_, "/w.sock"));
    EXPECT_TRUE(socket.ok()) << socket.status();
    return *std::move(socket);
  }
  static AttachMessage Vmm(const CudaAllocation& stated, char token = 't') {
    return {std::string(kAttachTokenBytes, token), MemoryKind::kCudaVmm, stated};
  }
  static WorkerAnswer Read(const ScopedDescriptor& socket) {
    const auto received = ReceiveMessage(socket.get(), kMaxAttachDatagramBytes, 0);
    const auto answer = ReadWorkerAnswer(received.ok() ? received->bytes : std::string());
    return answer.value_or(WorkerAnswer{AttachCode::kNotUnderstood, "no answer"});
  }
  static WorkerAnswer Show(const ScopedDescriptor& socket, const AttachMessage& message, int fd) {
    EXPECT_TRUE(SendMessage(socket.get(), Encode(message), fd, 0).ok());
    return Read(socket);
  }
  // Announces a region of `bytes`, sends `message` and returns the worker's answer.
  WorkerAnswer Answer(const AttachMessage& message, int fd, int64_t bytes = kMiB) {
    Expect("region", bytes);
    const ScopedDescriptor socket = Connect();
    return Show(socket, message, fd);
  }

  template <typename Is>
  int Count(const Is& is_it) {
    const absl::MutexLock lock(&mutex_);
    return static_cast<int>(std::count_if(sent_.begin(), sent_.end(), is_it));
  }

  // Runs an operation of `ranks` ranks whose tensors start at kRegionAt in the allocation: copies
  // its inputs, fills its outputs and copies these back.
  void CopyBothWays(int ranks, Layout layout, int64_t tokens) {
    SCOPED_TRACE(absl::StrCat(ranks, " ranks, ", tokens, " tokens"));
    in_ = out_ = 0;
    sent_.clear();
    CopiedOperation copied(tokens, ranks, layout, "region", device_.get());
    ASSERT_LE(kRegionAt + copied.region_bytes(), kAllocation);
    FakeAllocation client(kAllocation);
    uint8_t* const region = client.data() + kRegionAt;
    std::memset(client.data(), 0x77, kAllocation);
    copied.Fill(region);
    Expect("region", copied.region_bytes());
    const ScopedDescriptor socket = Connect();
    const WorkerAnswer answer = Show(socket, Vmm(client.Describe(kRegionAt)), client.descriptor());
    ASSERT_EQ(answer.code, AttachCode::kAttached) << answer.detail;
    EXPECT_EQ(imported_, kAllocation);
    memory_->Begin(copied.operation(), copied.reserve());
    ASSERT_TRUE(Await([&] { return Count([](const auto& m) { return m.has_uploaded(); }) == 1; }));
    int64_t bytes_in = 0, bytes_out = 0;
    const ShardPlan& plan = copied.operation()->operation().plan();
    for (TensorId id : {TensorId::kQ, TensorId::kK, TensorId::kV}) {
      EXPECT_TRUE(copied.HasArrived(id, region)) << TensorName(id);
      bytes_in += ShardMap(copied.spec(), plan, id).local_bytes(copied.rank());
    }
    EXPECT_EQ(in_, bytes_in);
    for (const ShardOperation::Output& output : copied.operation()->Outputs()) {
      auto* bytes = static_cast<uint8_t*>(const_cast<void*>(output.memory.data));
      for (int64_t i = 0; i < output.memory.bytes; ++i) {
        bytes[i] = static_cast<uint8_t>(i * 31 + static_cast<int>(output.id));
      }
      bytes_out += output.memory.bytes;
    }
    std::vector<uint8_t> expected(client.data(), client.data() + kAllocation);
    for (const ShardOperation::Output& output : copied.operation()->Outputs()) {
      const ShardMap map(copied.spec(), plan, output.id);
      const auto* from = static_cast<const uint8_t*>(output.memory.data);
      for (const ByteRun& run : map.FromLocal(copied.rank(), 0, map.local_bytes(copied.rank()))) {
        std::memcpy(expected.data() + kRegionAt + copied.offset(output.id) + run.global_offset,
                    from, run.bytes);
        from += run.bytes;
      }
    }
    copied.operation()->SetFinished();
    ASSERT_TRUE(Await([&] { return Count([](const auto& m) { return m.has_delivered(); }) == 1; }));
    // Only this rank's spans were written.
    EXPECT_EQ(std::memcmp(expected.data(), client.data(), kAllocation), 0);
    EXPECT_EQ(out_, bytes_out);
    copied.operation()->End(absl::CancelledError("released"));
    copied.Drop();
    EXPECT_TRUE(Await([&] { return copied.destroyed(); }));
  }

  std::string folder_;
  std::unique_ptr<CudaDevice> device_;
  absl::Mutex mutex_;
  std::vector<v1::JoinRequest> sent_;
  std::atomic<int64_t> in_{0}, out_{0}, imported_{0};
  std::atomic<int> regions_{0};
  std::atomic<AttachCode> refused_{AttachCode::kAttached};
  std::unique_ptr<LocalMemory> memory_;
};

TEST_F(CudaRegionsTest, CopiesShardInBothDirections) {
  CopyBothWays(1, Layout::kContiguous, 9'000);
  CopyBothWays(2, Layout::kContiguous, 9'001);
  CopyBothWays(2, Layout::kZigzag, 9'001);
  const int rows = Faults().copies_2d;
  CopyBothWays(2, Layout::kStriped, 9'000);
  EXPECT_GT(Faults().copies_2d, rows);  // short runs at equal distances
}

TEST_F(CudaRegionsTest, RejectsInvalidMemoryByName) {
  FakeAllocation client(kAllocation);
  const int fd = client.descriptor();
  CudaAllocation stated = client.Describe();
  stated.device_uuid[15] = 99;
  WorkerAnswer answer = Answer(Vmm(stated), fd);
  EXPECT_EQ(answer.code, AttachCode::kDeviceOutOfReach);
  EXPECT_THAT(answer.detail, HasSubstr("does not see the GPU"));
  stated = client.Describe();
  stated.bytes = 2 * kAllocation;
  answer = Answer(Vmm(stated), fd);
  EXPECT_EQ(answer.code, AttachCode::kDescriptorRefused);
  EXPECT_THAT(answer.detail, HasSubstr("does not have the 16777216 bytes"));
  // The region is not within the allocation: too long, or its offset would overflow.
  EXPECT_EQ(Answer(Vmm(client.Describe()), fd, kAllocation + 1).code,
            AttachCode::kDescriptorRefused);
  answer = Answer(Vmm(client.Describe(~uint64_t{0})), fd);
  EXPECT_EQ(answer.code, AttachCode::kDescriptorRefused);
  EXPECT_THAT(answer.detail, HasSubstr("not within"));
  EXPECT_EQ(refused_, AttachCode::kDescriptorRefused);
  const ScopedDescriptor host(memfd_create("host", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(host.get(), kAllocation), 0);
  EXPECT_EQ(Answer(Vmm(client.Describe()), host.get()).code, AttachCode::kDescriptorRefused);
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  EXPECT_EQ(Answer(Vmm(client.Describe()), pipe_ends[0]).code, AttachCode::kDescriptorRefused);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
  // A missing descriptor, and an unexpected one.
  EXPECT_EQ(Answer(Vmm(client.Describe()), -1).code, AttachCode::kNotUnderstood);
  AttachMessage ipc = Vmm(client.Describe());
  ipc.memory = MemoryKind::kCudaIpc;
  ipc.cuda.ipc_handle = std::string(kCudaIpcHandleBytes, 'h');
  EXPECT_EQ(Answer(ipc, fd).code, AttachCode::kNotUnderstood);
  ipc.cuda.exporter_pid = static_cast<uint32_t>(getpid());
  answer = Answer(ipc, -1);
  EXPECT_EQ(answer.code, AttachCode::kDescriptorRefused);
  EXPECT_THAT(answer.detail, HasSubstr("both have process id"));
  EXPECT_EQ(imported_, 0);
  EXPECT_EQ(regions_, 0);
}

TEST_F(CudaRegionsTest, TokenIsValidForOneUseAndOneKind) {
  FakeAllocation client(kAllocation);
  Expect("region", kMiB);
  const ScopedDescriptor first = Connect(), second = Connect(), third = Connect();
  EXPECT_EQ(Show(first, Vmm(client.Describe()), client.descriptor()).code, AttachCode::kAttached);
  EXPECT_EQ(Show(second, Vmm(client.Describe()), client.descriptor()).code,
            AttachCode::kNoSuchToken);
  Expect("other", kMiB, v1::REGION_KIND_HOST, 'h');
  const WorkerAnswer answer = Show(third, Vmm(client.Describe(), 'h'), client.descriptor());
  EXPECT_EQ(answer.code, AttachCode::kKindRefused);
  EXPECT_EQ(answer.detail, "a region of host memory was expected");
  // Host memory is rejected for a region of CUDA memory too.
  CopiedOperation host;
  Expect("third", host.region_bytes(), v1::REGION_KIND_CUDA, 'c');
  const ScopedDescriptor fourth = Connect();
  EXPECT_EQ(Show(fourth, {std::string(kAttachTokenBytes, 'c')}, host.MakeMemfd().get()).code,
            AttachCode::kKindRefused);
}

TEST_F(CudaRegionsTest, RejectsOtherUsers) {
  Start({geteuid() + 1});
  FakeAllocation client(kAllocation);
  Expect("region", kMiB);
  EXPECT_EQ(Read(Connect()).code, AttachCode::kForeignUser);
}

TEST_F(CudaRegionsTest, RespectsImportLimit) {
  FakeAllocation client(kAllocation);
  std::vector<ScopedDescriptor> sockets;
  for (int i = 0; i < 3; ++i) {
    Expect(absl::StrCat(i), kMiB, v1::REGION_KIND_CUDA, static_cast<char>('a' + i));
    sockets.push_back(Connect());
    ASSERT_EQ(Show(sockets.back(), Vmm(client.Describe(), static_cast<char>('a' + i)),
                   client.descriptor())
                  .code,
              AttachCode::kAttached);
  }
  EXPECT_EQ(imported_, 3 * kAllocation);
  WorkerAnswer answer = Answer(Vmm(client.Describe()), client.descriptor());
  EXPECT_EQ(answer.code, AttachCode::kTooMuch);
  EXPECT_THAT(answer.detail, HasSubstr("--max_imported_memory"));
  sockets.pop_back();
  EXPECT_TRUE(Await([&] { return imported_ == 2 * kAllocation; }));
  EXPECT_EQ(Answer(Vmm(client.Describe()), client.descriptor()).code, AttachCode::kAttached);
}

// A driver that takes seconds to map memory delays only its own client.
TEST_F(CudaRegionsTest, ImportsDoNotDelayFences) {
  FakeAllocation client(kAllocation);
  Expect("region", kMiB);
  const ScopedDescriptor attached = Connect();
  ASSERT_EQ(Show(attached, Vmm(client.Describe()), client.descriptor()).code,
            AttachCode::kAttached);
  FakeVmm().hold_imports = true;
  Expect("slow", kMiB, v1::REGION_KIND_CUDA, 's');
  ScopedDescriptor slow = Connect();
  ASSERT_TRUE(
      SendMessage(slow.get(), Encode(Vmm(client.Describe(), 's')), client.descriptor(), 0).ok());
  ASSERT_TRUE(Await([] { return FakeVmm().held_imports > 0; }));
  ASSERT_TRUE(SendMessage(attached.get(), Encode(FenceMessage{5}), -1, 0).ok());
  EXPECT_EQ(Read(attached).code, AttachCode::kFenced);
  FakeVmm().hold_imports = false;
  EXPECT_EQ(Read(slow).code, AttachCode::kAttached);
  EXPECT_EQ(regions_, 2);
}

TEST_F(CudaRegionsTest, ClientDeathDuringImportLeavesNothing) {
  FakeAllocation client(kAllocation);
  const int mappings = FakeVmm().mappings;
  FakeVmm().hold_imports = true;
  FakeVmm().held_imports = 0;
  Expect("region", kMiB);
  {
    const ScopedDescriptor socket = Connect();
    ASSERT_TRUE(
        SendMessage(socket.get(), Encode(Vmm(client.Describe())), client.descriptor(), 0).ok());
    ASSERT_TRUE(Await([] { return FakeVmm().held_imports > 0; }));
  }
  absl::SleepFor(absl::Milliseconds(20));  // the listener notices the closed socket
  FakeVmm().hold_imports = false;
  EXPECT_TRUE(Await([&] { return imported_ == 0 && FakeVmm().mappings == mappings; }));
  EXPECT_EQ(regions_, 0);
  EXPECT_EQ(Count([](const auto& m) { return m.has_region_changed(); }), 0);
}

// The client dies while the worker copies. The copy completes, the operation fails, and the memory
// is unmapped at once.
TEST_F(CudaRegionsTest, ClientDeathDuringCopyUnmapsMemory) {
  auto copied =
      std::make_unique<CopiedOperation>(9'000, 1, Layout::kContiguous, "region", device_.get());
  auto client = std::make_unique<FakeAllocation>(kAllocation);
  copied->Fill(client->data());
  Expect("region", copied->region_bytes());
  ScopedDescriptor socket = Connect();
  ASSERT_EQ(Show(socket, Vmm(client->Describe()), client->descriptor()).code,
            AttachCode::kAttached);
  const int mappings = FakeVmm().mappings;
  Faults().hold_copies = true;
  Faults().held_copies = 0;
  memory_->Begin(copied->operation(), copied->reserve());
  ASSERT_TRUE(Await([] { return Faults().held_copies > 0; }));
  client.reset();
  socket.Close();
  const auto released = [](const v1::JoinRequest& m) {
    return m.has_transfer_progress() && m.transfer_progress().region_released();
  };
  EXPECT_TRUE(Await([&] { return Count(released) == 1; }));
  EXPECT_EQ(imported_, kAllocation);  // the copy is still running
  Faults().hold_copies = false;
  copied->operation()->End(absl::CancelledError("released"));
  copied->Drop();
  EXPECT_TRUE(Await([&] { return copied->destroyed() && imported_ == 0; }));
  EXPECT_EQ(FakeVmm().mappings, mappings - 2);  // the client's own mapping too
}

TEST_F(CudaRegionsTest, ThousandRegionsLeaveNothing) {
  FakeAllocation client(kAllocation);
  const auto once = [&] {
    Expect("region", kMiB);
    const ScopedDescriptor socket = Connect();
    ASSERT_EQ(Show(socket, Vmm(client.Describe()), client.descriptor()).code,
              AttachCode::kAttached);
  };
  once();
  ASSERT_TRUE(Await([&] { return imported_ == 0 && regions_ == 0; }));
  const int descriptors = OpenDescriptors(), handles = FakeVmm().handles,
            mappings = FakeVmm().mappings, reservations = FakeVmm().reservations;
  for (int i = 0; i < 1000; ++i) {
    once();
    ASSERT_TRUE(Await([&] { return imported_ == 0 && regions_ == 0; }));
  }
  EXPECT_TRUE(Await([&] { return OpenDescriptors() <= descriptors; }));
  EXPECT_EQ(FakeVmm().handles, handles);
  EXPECT_EQ(FakeVmm().mappings, mappings);
  EXPECT_EQ(FakeVmm().reservations, reservations);
}

}  // namespace
}  // namespace ringattn::worker
