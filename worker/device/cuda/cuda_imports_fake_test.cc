// Imports of other processes' memory, with a fake driver whose allocations are memfds.
#include "worker/device/cuda/cuda_imports.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/testing/fake_cuda/fake_cuda.h"
#include "worker/testing/fake_cuda/fake_vmm.h"
#include "worker/testing/fake_cuda/shared_allocation.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kBytes = 4 * kMiB;

int OpenDescriptors() {
  int count = 0;
  for (int fd = 0; fd < 4096; ++fd) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

class CudaImportsTest : public testing::Test {
 protected:
  void SetUp() override {
    auto device = CudaDevice::Create({.device = 0, .pinned_pool_bytes = 32 * kMiB});
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
  }
  void TearDown() override {
    Faults().no_peer_access = false;
    FakeVmm().refuse_access = false;
  }

  static SharedAllocation Vmm(const FakeAllocation& of) {
    return {.descriptor = of.descriptor(), .device_uuid = of.uuid(), .bytes = kBytes};
  }
  absl::Status Why(const SharedAllocation& allocation) {
    return device_->ImportMemory(allocation).status();
  }

  std::unique_ptr<CudaDevice> device_;
};

TEST_F(CudaImportsTest, CopiesInBothDirections) {
  for (const int gpu : {0, 1}) {
    FakeAllocation client(kBytes, gpu);
    for (int64_t i = 0; i < kBytes; ++i) client.data()[i] = static_cast<uint8_t>(i * 7 >> 3);
    auto imported = device_->ImportMemory(Vmm(client));
    ASSERT_TRUE(imported.ok()) << imported.status();
    EXPECT_NE((*imported)->data(), client.data());
    auto memory = device_->Allocate(kBytes);
    ASSERT_TRUE(memory.ok());
    auto* own = static_cast<uint8_t*>((*memory)->data());
    auto in = device_->CopyImported(
        {{own, (*imported)->data() + 512, kMiB}, {own + kMiB, (*imported)->data(), 77}},
        ImportedCopy::kIn);
    ASSERT_TRUE(in.ok()) << in.status();
    ASSERT_TRUE((*in)->Wait(absl::InfiniteFuture()).ok());
    EXPECT_EQ(std::memcmp(own, client.data() + 512, kMiB), 0);
    EXPECT_EQ(std::memcmp(own + kMiB, client.data(), 77), 0);
    std::memset(own, 0xcd, kMiB);
    auto out =
        device_->CopyImported({{(*imported)->data() + kMiB + 1, own, kMiB}}, ImportedCopy::kOut);
    ASSERT_TRUE(out.ok()) << out.status();
    ASSERT_TRUE((*out)->Wait(absl::InfiniteFuture()).ok());
    EXPECT_GE((*out)->end_time(), (*out)->begin_time());
    EXPECT_EQ(client.data()[kMiB + 1], 0xcd);
    EXPECT_EQ(client.data()[2 * kMiB], 0xcd);
    EXPECT_NE(client.data()[2 * kMiB + 1], 0xcd);
  }
}

// Rows at equal distances become one copy, others do not. The bytes are the same.
TEST_F(CudaImportsTest, RowsOfRectangleBecomeOneCopy) {
  FakeAllocation client(kBytes);
  for (int64_t i = 0; i < kBytes; ++i) client.data()[i] = static_cast<uint8_t>(i * 13 >> 5);
  auto imported = device_->ImportMemory(Vmm(client));
  ASSERT_TRUE(imported.ok());
  std::vector<uint8_t> own(kMiB, 0);
  std::vector<DeviceCopy> pieces;
  for (int64_t row = 0; row < 100; ++row) {
    pieces.push_back({own.data() + row * 64, (*imported)->data() + row * 256, 64});
  }
  pieces.push_back({own.data() + 6400, (*imported)->data() + 100 * 256, 32});  // shorter
  pieces.push_back({own.data() + 6432, (*imported)->data() + 3 * kMiB, 32});   // elsewhere
  pieces.push_back(
      {own.data() + 6464, (*imported)->data() + 3 * kMiB - 4096, 32});  // at a lower address
  const int copies = Faults().copies_2d;
  auto copied = device_->CopyImported(pieces, ImportedCopy::kIn);
  ASSERT_TRUE(copied.ok()) << copied.status();
  ASSERT_TRUE((*copied)->Wait(absl::InfiniteFuture()).ok());
  EXPECT_EQ(Faults().copies_2d - copies, 2);
  for (const DeviceCopy& piece : pieces) {
    const auto offset = static_cast<const uint8_t*>(piece.from) - (*imported)->data();
    EXPECT_EQ(std::memcmp(piece.to, client.data() + offset, piece.bytes), 0) << offset;
  }
}

TEST_F(CudaImportsTest, RejectsInvalidHandlesByName) {
  FakeAllocation client(kBytes), other(kBytes, 1);
  SharedAllocation stated = Vmm(client);
  stated.device_uuid[15] = 77;
  EXPECT_EQ(Why(stated).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(Why(stated).message().find("does not see the GPU"), std::string::npos);
  stated = Vmm(other);
  stated.device_uuid = client.uuid();
  EXPECT_EQ(Why(stated).message(),
            "the descriptor's memory is on another GPU than the client stated");
  stated = Vmm(client);
  stated.bytes = kBytes + 2 * kMiB;
  EXPECT_EQ(Why(stated).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Why(stated).message(),
            "the allocation does not have the 6291456 bytes that the client stated");
  stated.bytes = kBytes - 1;
  EXPECT_NE(Why(stated).message().find("not a multiple"), std::string::npos);
  stated.bytes = 0;
  EXPECT_EQ(Why(stated).message(), "the allocation has no bytes");
  stated = Vmm(client);
  const ScopedDescriptor memfd(memfd_create("host", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(memfd.get(), kBytes), 0);
  stated.descriptor = memfd.get();
  EXPECT_EQ(Why(stated).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(Why(stated).message().find("does not refer to shareable CUDA memory"),
            std::string::npos);
  stated.descriptor = 4000;  // closed
  EXPECT_EQ(Why(stated).code(), absl::StatusCode::kInvalidArgument);
  Faults().no_peer_access = true;
  EXPECT_EQ(Why(Vmm(other)).message(), "this worker's GPU has no peer access to the memory's GPU");
  EXPECT_TRUE(Why(Vmm(client)).ok());
  FakeVmm().refuse_access = true;
  EXPECT_EQ(Why(Vmm(client)).code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(CudaImportsTest, RejectsIpcHandleOfEqualProcessId) {
  void* data = nullptr;
  ASSERT_EQ(cudaMalloc(&data, kBytes), cudaSuccess);
  std::memset(data, 0x3c, kBytes);
  cudaIpcMemHandle_t handle;
  ASSERT_EQ(cudaIpcGetMemHandle(&handle, data), cudaSuccess);
  std::string uuid(16, '\0');
  uuid.back() = '\1';
  SharedAllocation stated{.ipc_handle = std::string(handle.reserved, sizeof(handle.reserved)),
                          .exporter_pid = static_cast<uint32_t>(getpid()) + 1,
                          .device_uuid = uuid,
                          .bytes = kBytes};
  {
    auto imported = device_->ImportMemory(stated);
    ASSERT_TRUE(imported.ok()) << imported.status();
    EXPECT_EQ((*imported)->data()[kBytes - 1], 0x3c);
    EXPECT_EQ(Faults().mapped, 1);
  }
  EXPECT_EQ(Faults().mapped, 0);
  stated.bytes = kBytes + 1;
  EXPECT_NE(Why(stated).message().find("does not have the"), std::string::npos);
  stated.bytes = kBytes;
  stated.exporter_pid = static_cast<uint32_t>(getpid());
  EXPECT_EQ(Why(stated).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(Why(stated).message().find("both have process id"), std::string::npos);
  stated.exporter_pid += 1;
  Faults().refuse_mapping = true;
  EXPECT_NE(Why(stated).message().find("cudaIpcOpenMemHandle"), std::string::npos);
  Faults().refuse_mapping = false;
  stated.ipc_handle.pop_back();
  EXPECT_EQ(Why(stated).message(), "the handle does not refer to CUDA memory");
  EXPECT_EQ(Faults().mapped, 0);
  cudaFree(data);
}

TEST_F(CudaImportsTest, ThousandImportsLeaveNothing) {
  FakeAllocation client(kBytes);
  ASSERT_TRUE(Why(Vmm(client)).ok());
  const int descriptors = OpenDescriptors(), handles = FakeVmm().handles,
            mappings = FakeVmm().mappings, reservations = FakeVmm().reservations;
  SharedAllocation wrong = Vmm(client);
  wrong.bytes = 2 * kBytes;
  for (int i = 0; i < 1000; ++i) {
    ASSERT_TRUE(Why(Vmm(client)).ok());
    ASSERT_FALSE(Why(wrong).ok());
  }
  EXPECT_EQ(OpenDescriptors(), descriptors);
  EXPECT_EQ(FakeVmm().handles, handles);
  EXPECT_EQ(FakeVmm().mappings, mappings);
  EXPECT_EQ(FakeVmm().reservations, reservations);
}

}  // namespace
}  // namespace ringattn::worker
