// What Create accepts. Needs a toolkit, but no device: arguments are checked before any CUDA call.
#include "worker/kernels/cuda/paged/paged_attention.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace ringattn::worker::cuda::paged {
namespace {

struct Arguments {
  CacheShape shape;
  AttentionOptions options;
  BatchClass batch;
  Buffers buffers;
  DeviceInfo device{132, 9, 232448};

  Arguments() {
    shape.num_kv_heads = 8;
    shape.head_dim = shape.head_dim_v = 128;
    shape.blocks = 1024;
    options.num_heads = 32;
    // Never read: addresses alone are checked.
    char* const memory = reinterpret_cast<char*>(uintptr_t{1} << 20);
    buffers.cache = memory;
    buffers.step = reinterpret_cast<const PagedStep*>(memory);
    buffers.rows = reinterpret_cast<const PagedRow*>(memory);
    buffers.tables = reinterpret_cast<const int32_t*>(memory);
    buffers.q = buffers.k = buffers.v = memory;
    buffers.out = memory;
    buffers.workspace = memory;
  }

  std::string Error() const {
    const auto attention = PagedAttention::Create(shape, options, batch, buffers, device);
    EXPECT_EQ(attention.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(attention.status().message());
  }
  int64_t Workspace(KernelChoice choice = KernelChoice::kAutomatic) const {
    return PagedAttention::WorkspaceBytes(shape, options, batch, device, choice);
  }
};

TEST(PagedAttention, NamesTheArgumentThatIsOutOfRange) {
  const std::vector<std::pair<std::function<void(Arguments&)>, std::string>> cases = {
      {[](Arguments& a) { a.shape.head_dim = 257; }, "head_dim is 257; it must be from 1 to 256"},
      {[](Arguments& a) { a.shape.head_dim_v = 0; }, "head_dim_v is 0; it must be from 1 to 256"},
      {[](Arguments& a) { a.shape.block_tokens = 48; },
       "block_tokens is 48; it must be 16, 32, 64, 128 or 256"},
      {[](Arguments& a) { a.shape.block_tokens = 512; }, "block_tokens is 512"},
      {[](Arguments& a) { a.shape.blocks = int64_t{1} << 26; }, "a plane of 67108864 blocks"},
      {[](Arguments& a) { a.shape.planes = 0; }, "planes is 0"},
      {[](Arguments& a) { a.shape.position_parts = 0; }, "position_parts is 0"},
      {[](Arguments& a) { a.shape.position_part = 1; },
       "position_part is 1; it must be from 0 to 0"},
      {[](Arguments& a) { a.shape.position_parts = 2; },
       "position_parts is 2; results of one part are partial"},
      {[](Arguments& a) { a.shape.k_row_elements = 1000; },
       "k_row_elements is 1000; it must be from 1024 to 16777216"},
      {[](Arguments& a) { a.shape.v_row_elements = -1; }, "v_row_elements is -1"},
      {[](Arguments& a) { a.options.num_heads = 12; },
       "num_heads is 12; it must be a multiple of num_kv_heads, 8"},
      {[](Arguments& a) { a.options.softcap = -1.0f; }, "softcap is -1"},
      {[](Arguments& a) { a.options.window_left = -2; }, "window_left is -2"},
      {[](Arguments& a) { a.batch.max_rows = 0; }, "max_rows is 0"},
      {[](Arguments& a) { a.batch.max_q_tokens = 2; }, "max_q_tokens is 2; it must be from 1 to 1"},
      {[](Arguments& a) { a.batch.splits = 257; }, "splits is 257; it must be from 0 to 256"},
      {[](Arguments& a) { a.buffers.q = nullptr; }, "q is null"},
      {[](Arguments& a) { a.buffers.k = nullptr; }, "k is null"},
      {[](Arguments& a) { a.buffers.out = static_cast<char*>(a.buffers.out) + 8; },
       "out must be aligned to 16 bytes"},
      {[](Arguments& a) { a.buffers.workspace = static_cast<char*>(a.buffers.workspace) + 16; },
       "workspace must be aligned to 256 bytes"},
      {[](Arguments& a) { a.buffers.done = reinterpret_cast<uint32_t*>(uintptr_t{2}); },
       "done must be aligned to 4 bytes"},
      {[](Arguments& a) {
         a.buffers.fetched = {a.buffers.cache, a.buffers.cache, 24};
       },
       "fetched.bytes is 24; it must be a multiple of 16"},
      {[](Arguments& a) {
         a.buffers.fetched = {a.buffers.cache, a.buffers.cache, 2 << 20};
       },
       "fetched.bytes is 2097152; it must be from 0 to 1048576"},
      {[](Arguments& a) {
         a.buffers.fetched = {nullptr, a.buffers.cache, 16};
       },
       "fetched.source is null"},
  };
  for (const auto& [change, text] : cases) {
    Arguments arguments;
    change(arguments);
    EXPECT_NE(arguments.Error().find(text), std::string::npos) << arguments.Error();
  }
}

TEST(PagedAttention, WorkspaceHoldsTwoPartialResultsAndTicketsForEachColumn) {
  Arguments arguments;
  arguments.batch.splits = 4;
  const int64_t four = arguments.Workspace();
  arguments.batch.splits = 8;
  const int64_t eight = arguments.Workspace();
  // 2 slots, 8 packs of 64 rows (sm_90) or 16 (portable), 128 columns and an lse; and the slots'
  // tickets.
  const bool sm90 = four != arguments.Workspace(KernelChoice::kPortable) && eight - four > 500000;
  EXPECT_EQ(eight - four, int64_t{4} * 2 * 8 * ((sm90 ? 64 : 16) * (128 + 1) + 1) * 4);
  arguments.batch.splits = 300;
  EXPECT_EQ(arguments.Workspace(), 0);
}

TEST(PagedAttention, WorkspaceBeginsWithTheBytesForCounters) {
  Arguments arguments;
  const int64_t without = arguments.Workspace();
  arguments.batch.counter_bytes = 256;  // less than the object needs
  EXPECT_EQ(arguments.Workspace(), without);
  arguments.batch.counter_bytes = 1 << 20;
  const int64_t with = arguments.Workspace();
  arguments.batch.counter_bytes = (1 << 20) + 256;
  EXPECT_EQ(arguments.Workspace(), with + 256);
  EXPECT_GT(with, without);
}

TEST(CacheShape, CountsBytes) {
  CacheShape shape;
  shape.dtype = DType::kFloat32;
  shape.num_kv_heads = 2;
  shape.head_dim = 64;
  shape.head_dim_v = 32;
  shape.block_tokens = 16;
  shape.blocks = 3;
  shape.planes = 5;
  EXPECT_EQ(shape.k_plane_bytes(), 3 * 16 * 2 * 64 * 4);
  EXPECT_EQ(shape.v_plane_bytes(), 3 * 16 * 2 * 32 * 4);
  EXPECT_EQ(shape.bytes(), 5 * 3 * 16 * 2 * (64 + 32) * 4);
}

}  // namespace
}  // namespace ringattn::worker::cuda::paged
