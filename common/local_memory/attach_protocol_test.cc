#include "common/local_memory/attach_protocol.h"

#include "gtest/gtest.h"

namespace ringattn {
namespace {

const std::string kToken = "0123456789abcdef";

TEST(AttachProtocolTest, ClientMessagesKeepWhatTheySay) {
  const auto attach = ReadClientMessage(Encode(AttachMessage{kToken}));
  ASSERT_TRUE(attach.has_value());
  EXPECT_EQ(std::get<AttachMessage>(*attach).token, kToken);
  const auto fence = ReadClientMessage(Encode(FenceMessage{0xfedcba9876543210u}));
  ASSERT_TRUE(fence.has_value());
  EXPECT_EQ(std::get<FenceMessage>(*fence).number, 0xfedcba9876543210u);
}

TEST(AttachProtocolTest, CudaMemoryKeepsWhatItSays) {
  AttachMessage said{kToken, MemoryKind::kCudaVmm};
  said.cuda = {.device_uuid = std::string(kDeviceUuidBytes, 'u'), .bytes = 6u << 20, .offset = 512};
  auto read = ReadClientMessage(Encode(said));
  ASSERT_TRUE(read.has_value());
  const auto vmm = std::get<AttachMessage>(*read);
  EXPECT_EQ(vmm.memory, MemoryKind::kCudaVmm);
  EXPECT_EQ(vmm.token, kToken);
  EXPECT_EQ(vmm.cuda.device_uuid, said.cuda.device_uuid);
  EXPECT_EQ(vmm.cuda.bytes, said.cuda.bytes);
  EXPECT_EQ(vmm.cuda.offset, said.cuda.offset);
  said.memory = MemoryKind::kCudaIpc;
  said.cuda.exporter_pid = 4711;
  said.cuda.ipc_handle = std::string(kCudaIpcHandleBytes, 'h');
  read = ReadClientMessage(Encode(said));
  ASSERT_TRUE(read.has_value());
  const auto ipc = std::get<AttachMessage>(*read);
  EXPECT_EQ(ipc.memory, MemoryKind::kCudaIpc);
  EXPECT_EQ(ipc.cuda.exporter_pid, 4711u);
  EXPECT_EQ(ipc.cuda.ipc_handle, said.cuda.ipc_handle);
  const std::string datagram = Encode(said);
  EXPECT_FALSE(ReadClientMessage(datagram.substr(0, datagram.size() - 1)).has_value());
  EXPECT_FALSE(ReadClientMessage(datagram + "x").has_value());
}

// Fixes the bytes, so that clients in other languages can encode them.
TEST(AttachProtocolTest, TheirBytesAreFixed) {
  EXPECT_EQ(Encode(AttachMessage{kToken}),
            std::string("\2\0\0\0\1\0\0\0", 8) + kToken + std::string("\1\0\0\0", 4));
  AttachMessage vmm{kToken, MemoryKind::kCudaVmm};
  vmm.cuda = {.device_uuid = kToken, .bytes = 258, .offset = 3};
  EXPECT_EQ(Encode(vmm), std::string("\2\0\0\0\1\0\0\0", 8) + kToken + std::string("\2\0\0\0", 4) +
                             kToken + std::string("\2\1\0\0\0\0\0\0\3\0\0\0\0\0\0\0", 16));
  EXPECT_EQ(Encode(FenceMessage{258}), std::string("\2\0\0\0\2\0\0\0\2\1\0\0\0\0\0\0", 16));
  EXPECT_EQ(Encode(WorkerAnswer{AttachCode::kNoSuchToken, "no"}),
            std::string("\2\0\0\0\2\0\0\0no", 10));
}

TEST(AttachProtocolTest, OtherFormsAreNotRead) {
  EXPECT_FALSE(ReadClientMessage("").has_value());
  EXPECT_FALSE(ReadClientMessage("\1").has_value());
  const std::string good = Encode(AttachMessage{kToken});
  EXPECT_FALSE(ReadClientMessage(good.substr(0, good.size() - 1)).has_value());
  EXPECT_FALSE(ReadClientMessage(good + "x").has_value());
  std::string other_kind = good;
  other_kind[4] = 9;
  EXPECT_FALSE(ReadClientMessage(other_kind).has_value());
}

TEST(AttachProtocolTest, OtherVersionsAndKindsAreNamed) {
  std::string other_memory = Encode(AttachMessage{kToken});
  other_memory[8 + kAttachTokenBytes] = 9;
  const auto unknown = ReadClientMessage(other_memory);
  ASSERT_TRUE(unknown.has_value());
  EXPECT_EQ(std::get<UnknownMemory>(*unknown).kind, 9u);
  // Version 1 has no kind of memory.
  const auto old = ReadClientMessage(std::string("\1\0\0\0\1\0\0\0", 8) + kToken);
  ASSERT_TRUE(old.has_value());
  EXPECT_EQ(std::get<OtherVersion>(*old).version, 1u);
  const std::string answer = Encode(WorkerAnswer{AttachCode::kNotUnderstood, "why"}, 1);
  EXPECT_EQ(answer, std::string("\1\0\0\0\1\0\0\0why", 11));
  const auto read = ReadWorkerAnswer(answer);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->code, AttachCode::kNotUnderstood);
  EXPECT_EQ(read->detail, "why");
  EXPECT_FALSE(ReadWorkerAnswer(std::string("\1\0\0\0\0\0\0\0", 8)).has_value());
}

TEST(AttachProtocolTest, AnswersKeepWhatTheySay) {
  const auto refused = ReadWorkerAnswer(Encode(WorkerAnswer{AttachCode::kCannotMap, "why"}));
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->code, AttachCode::kCannotMap);
  EXPECT_EQ(refused->detail, "why");
  const auto fenced = ReadWorkerAnswer(Encode(WorkerAnswer{AttachCode::kFenced, "", 7}));
  ASSERT_TRUE(fenced.has_value());
  EXPECT_EQ(fenced->number, 7u);
  const std::string longest =
      Encode(WorkerAnswer{AttachCode::kCannotMap, std::string(10'000, 'x')});
  EXPECT_EQ(longest.size(), kMaxAttachDatagramBytes);
  EXPECT_FALSE(ReadWorkerAnswer("\2\0\0").has_value());
  EXPECT_FALSE(ReadWorkerAnswer(std::string("\2\0\0\0\x63\0\0\0", 8)).has_value());
}

}  // namespace
}  // namespace ringattn
