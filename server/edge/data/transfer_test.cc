// Tests of UploadRouter and DownloadMerger against each other and against a plain copy, for every
// layout, ring size and chunking.
#include <algorithm>
#include <map>
#include <random>
#include <string>

#include "common/layout/tensor_route.h"
#include "common/wire/crc32c.h"
#include "common/wire/grpc_slices.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/edge/data/download_merger.h"
#include "server/edge/data/inline_plane.h"
#include "server/edge/data/upload_router.h"

namespace ringattn::server {
namespace {

ValidRequest MakeRequest(int64_t batch, int64_t sq, int64_t sk, int64_t heads, int64_t dim,
                         DType dtype) {
  ValidRequest request;
  request.spec.dtype = dtype;
  AttentionShape& shape = request.spec.shape;
  shape.batch = batch;
  shape.seq_len_q = sq;
  shape.seq_len_kv = sk;
  shape.num_heads = shape.num_kv_heads = heads;
  shape.head_dim = shape.head_dim_v = dim;
  shape.cu_seqlens_q = {0, sq};
  shape.cu_seqlens_k = {0, sk};
  request.inputs = InputsOf(request.spec, Direction::kForward, false);
  request.outputs = OutputsOf(request.spec, Direction::kForward);
  return request;
}

std::string RandomBytes(int64_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::string result(bytes, '\0');
  for (char& c : result) c = static_cast<char>(random());
  return result;
}

// Splits the data into slices of `slice_bytes`, as gRPC delivers it.
std::vector<grpc::Slice> Slices(const std::string& data, int64_t slice_bytes) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < data.size(); at += slice_bytes) {
    slices.emplace_back(data.substr(at, slice_bytes));
  }
  return slices;
}

// Returns a rank's local tensor, from the definition of a shard.
std::string Shred(const std::string& global, const TensorLayout& layout, const Shard& shard) {
  std::string local;
  for (int64_t outer = 0; outer < layout.outer; ++outer) {
    for (const Span& span : shard) {
      for (int64_t i = 0; i < span.length; ++i) {
        const int64_t token = span.begin + i * span.stride;
        local +=
            global.substr((outer * layout.rows + token) * layout.inner_bytes, layout.inner_bytes);
      }
    }
  }
  return local;
}

std::string PayloadOf(const grpc::ByteBuffer& buffer, const wire::StreamMessage& type,
                      wire::ChunkHeader* header) {
  auto message = wire::ReceivedMessage::Parse(type, buffer);
  EXPECT_TRUE(message.ok());
  EXPECT_TRUE(message->is_chunk());
  *header = message->chunk();
  std::string payload(message->payload_bytes(), '\0');
  wire::CopyFragments(message->payload(), payload.data());
  return payload;
}

struct Case {
  Layout layout;
  int world_size;
  int64_t sq, sk, heads, dim;
  DType dtype;
  int64_t chunk_bytes;
  // A bias with its gradient and a mask, sharded by queries or by keys; null: none.
  std::optional<bool> pairs_by_keys = std::nullopt;

  void AddTo(AttentionSpec& spec) const {
    if (!pairs_by_keys.has_value()) return;
    spec.options.bias = BiasForm{.per_batch = true, .gradient = true};
    spec.options.mask = MaskForm{.per_head = true};
  }
  ShardPlan PlanFor(const AttentionSpec& spec) const {
    ShardPlan plan = MakeShardPlan(spec, layout, world_size);
    if (pairs_by_keys.value_or(false)) plan.pair_axis = Axis::kKv;
    return plan;
  }
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (Layout layout :
       {Layout::kContiguous, Layout::kZigzag, Layout::kStriped, Layout::kZigzagPerDocument}) {
    for (int world_size : {1, 2, 3, 4, 8}) {
      cases.push_back({layout, world_size, 203, 211, 4, 24, DType::kFloat32, 7001});
      // The size of members' chunks below, and half of it: some are passed on unchanged.
      cases.push_back({layout, world_size, 203, 211, 4, 24, DType::kFloat32, 3000});
      cases.push_back({layout, world_size, 203, 211, 4, 24, DType::kFloat32, 1500});
      cases.push_back({layout, world_size, 64, 5, 1, 1, DType::kBFloat16, 100});
      cases.push_back({layout, world_size, 300, 300, 8, 128, DType::kFloat32, 1 << 20});
      cases.push_back({layout, world_size, 0, 3, 1, 8, DType::kFloat16, 64});
      for (const bool by_keys : {false, true}) {
        cases.push_back({layout, world_size, 24, 40, 2, 4, DType::kBFloat16, 333, by_keys});
        cases.push_back({layout, world_size, 9, 5, 1, 3, DType::kFloat32, 7, by_keys});
        cases.push_back({layout, world_size, 7, 0, 1, 3, DType::kFloat32, 100, by_keys});
        cases.push_back({layout, world_size, 0, 7, 1, 3, DType::kFloat16, 100, by_keys});
      }
    }
  }
  return cases;
}

TEST(TransferTest, RoutedChunksAreTheShards) {
  const Limits limits;
  for (const Case& c : Cases()) {
    ValidRequest request = MakeRequest(2, c.sq, c.sk, c.heads, c.dim, c.dtype);
    request.spec.options.sinks = true;  // goes to every rank
    c.AddTo(request.spec);
    request.inputs = InputsOf(request.spec, Direction::kForward, false);
    const ShardPlan plan = c.PlanFor(request.spec);
    UploadRouter router(request, plan, limits);
    std::map<std::pair<int, int>, std::string> locals;  // (tensor, rank)
    std::vector<std::pair<TensorId, int64_t>> chunks;
    std::map<TensorId, std::string> tensors;
    for (TensorId id : request.inputs) {
      const int64_t bytes = LayoutOf(request.spec, id).bytes();
      tensors[id] = RandomBytes(bytes, static_cast<uint32_t>(id));
      for (int64_t at = 0; at < bytes; at += c.chunk_bytes) chunks.emplace_back(id, at);
    }
    std::shuffle(chunks.begin(), chunks.end(), std::mt19937(5));
    for (const auto& [id, offset] : chunks) {
      ASSERT_FALSE(router.complete());
      const std::string data = tensors[id].substr(offset, c.chunk_bytes);
      wire::ChunkHeader header{static_cast<int>(id), static_cast<uint64_t>(offset),
                               wire::Crc32c(data.data(), data.size())};
      std::vector<RoutedChunk> routed;
      const auto failure = router.Route(header, Slices(data, 5000), &routed);
      ASSERT_FALSE(failure.has_value()) << failure->message;
      for (const RoutedChunk& part : routed) {
        wire::ChunkHeader local;
        const std::string payload = PayloadOf(part.message, wire::kExchangeRequest, &local);
        EXPECT_EQ(static_cast<int64_t>(payload.size()), part.payload_bytes);
        std::string& target = locals[{local.tensor, part.rank}];
        if (target.size() < local.offset + payload.size()) {
          target.resize(local.offset + payload.size());
        }
        target.replace(local.offset, payload.size(), payload);
      }
    }
    EXPECT_TRUE(router.complete());
    EXPECT_EQ(router.received_bytes(), router.total_bytes());
    for (TensorId id : request.inputs) {
      const TensorLayout layout = LayoutOf(request.spec, plan, id);
      for (int rank = 0; rank < c.world_size; ++rank) {
        const Shard shard = ShardsOf(plan, layout)[rank];
        EXPECT_EQ((locals[{static_cast<int>(id), rank}]), Shred(tensors[id], layout, shard));
      }
    }
  }
}

TEST(TransferTest, MergedStreamsAreTheTensors) {
  for (const Case& c : Cases()) {
    ValidRequest request = MakeRequest(2, c.sq, c.sk, c.heads, c.dim, c.dtype);
    request.spec.options.sinks = true;  // whose gradient rank 0 holds
    c.AddTo(request.spec);
    for (TensorId id : OutputsOf(request.spec, Direction::kBackward)) request.outputs.push_back(id);
    const ShardPlan plan = c.PlanFor(request.spec);
    constexpr int64_t kReadAhead = 4096;
    DownloadMerger merger(request, plan, wire::kForwardResponse, c.chunk_bytes, true, kReadAhead);
    struct Piece {
      wire::ChunkHeader header;
      std::string data;
    };
    std::vector<std::vector<Piece>> streams(c.world_size);
    std::map<TensorId, std::string> tensors, merged;
    for (TensorId id : request.outputs) {
      const TensorLayout layout = LayoutOf(request.spec, plan, id);
      tensors[id] = RandomBytes(layout.bytes(), 77 + static_cast<uint32_t>(id));
      for (int rank = 0; rank < c.world_size; ++rank) {
        const std::string local = Shred(tensors[id], layout, ShardsOf(plan, layout)[rank]);
        for (size_t at = 0; at < local.size(); at += 3000) {
          const std::string data = local.substr(at, 3000);
          const uint32_t crc = wire::Crc32c(data.data(), data.size());
          streams[rank].push_back({{static_cast<int>(id), at, crc}, data});
        }
      }
    }
    std::vector<size_t> at(c.world_size, 0);
    std::mt19937 random(3);
    int64_t expected_offset = 0;
    TensorId last = TensorId::kQ;
    for (int idle = 0; !merger.done(); ++idle) {
      ASSERT_LT(idle, 100000) << "stuck";
      const int rank = static_cast<int>(random() % c.world_size);
      if (at[rank] < streams[rank].size() && merger.HasRoom(rank)) {
        const Piece& piece = streams[rank][at[rank]++];
        ASSERT_TRUE(merger.Add(rank, piece.header, Slices(piece.data, 1100)).ok());
      }
      while (auto chunk = merger.Next()) {
        wire::ChunkHeader header;
        const std::string payload = PayloadOf(chunk->message, wire::kForwardResponse, &header);
        const auto id = static_cast<TensorId>(header.tensor);
        if (id != last) expected_offset = 0;
        last = id;
        EXPECT_EQ(header.offset, static_cast<uint64_t>(expected_offset));
        EXPECT_LE(static_cast<int64_t>(payload.size()), c.chunk_bytes);
        EXPECT_EQ(header.crc32c, wire::Crc32c(payload.data(), payload.size()));
        expected_offset += payload.size();
        merged[id] += payload;
      }
    }
    EXPECT_EQ(merger.sent_bytes(), merger.total_bytes());
    for (TensorId id : request.outputs) EXPECT_EQ(merged[id], tensors[id]);
  }
}

// Requests whose tensors have different layouts for clients and workers.
std::vector<ValidRequest> FormRequests() {
  std::vector<ValidRequest> requests;
  ValidRequest qkv = MakeRequest(2, 300, 300, 4, 24, DType::kBFloat16);
  qkv.spec.shape.packing = Packing::kQkv;
  requests.push_back(qkv);
  // More than one block of a stream per rank.
  ValidRequest wide = MakeRequest(1, 700, 700, 8, 128, DType::kFloat32);
  wide.spec.shape.packing = Packing::kQkv;
  requests.push_back(wide);
  ValidRequest kv = MakeRequest(2, 64, 211, 4, 5, DType::kFloat16);
  kv.spec.shape.packing = Packing::kKv;
  requests.push_back(kv);
  ValidRequest documents = MakeRequest(1, 1203, 1203, 4, 24, DType::kFloat32);
  documents.spec.shape.packed = true;
  documents.spec.shape.cu_seqlens_q =
      documents.spec.shape.cu_seqlens_k = {0, 7, 7, 50, 203, 204, 900, 1203};
  documents.spec.lse_per_document = documents.spec.has_dlse = true;
  requests.push_back(documents);
  documents.spec.shape.packing = Packing::kQkv;
  requests.push_back(documents);
  for (ValidRequest& request : requests) {
    request.direction = Direction::kBackward;
    request.inputs = InputsOf(request.spec, Direction::kBackward, false);
    request.outputs = OutputsOf(request.spec, Direction::kBackward);
    // lse is an output of Forward.
    if (request.spec.lse_per_document)
      request.outputs.insert(request.outputs.begin(), TensorId::kLse);
  }
  return requests;
}

// Returns the client's bytes, with `hole` for bytes that no member has.
std::string Whole(const ValidRequest& request, const ShardPlan& plan, TensorId id,
                  const std::map<std::pair<TensorId, int>, std::string>& locals, char hole) {
  const TensorRoute route(request.spec, plan, id);
  std::string whole(route.global_bytes(), hole);
  for (size_t part = 0; part < route.parts().size(); ++part) {
    for (int rank = 0; rank < plan.world_size; ++rank) {
      const std::string& local = locals.at({route.parts()[part], rank});
      for (const ByteRun& run : route.FromLocal(part, rank, 0, local.size())) {
        whole.replace(run.global_offset, run.bytes, local.substr(run.local_offset, run.bytes));
      }
    }
  }
  return whole;
}

// Returns random shards of a client's tensors.
std::map<std::pair<TensorId, int>, std::string> RandomShards(const ValidRequest& request,
                                                             const ShardPlan& plan,
                                                             const std::vector<TensorId>& ids) {
  std::map<std::pair<TensorId, int>, std::string> locals;
  for (TensorId id : ids) {
    for (TensorId part : PartsOf(id)) {
      const ShardMap map(request.spec, plan, part);
      for (int rank = 0; rank < plan.world_size; ++rank) {
        locals[{part, rank}] =
            RandomBytes(map.local_bytes(rank), 7 * static_cast<uint32_t>(part) + rank);
      }
    }
  }
  return locals;
}

struct PartRun {
  TensorId part;
  int64_t offset = 0;  // in its shard
  std::string bytes;
};

// Maps each byte of a shard of `id`, from `offset` on, to the client's byte.
std::vector<PartRun> PartRuns(const ValidRequest& request, TensorId id, int64_t offset,
                              const std::string& bytes) {
  const std::vector<TensorId> parts = PartsOf(id);
  if (parts.size() == 1) return {{id, offset, bytes}};
  const int64_t part_bytes = LayoutOf(request.spec, parts[0]).inner_bytes;
  const auto count = static_cast<int64_t>(parts.size());
  std::vector<PartRun> runs;
  for (int64_t at = offset; at < offset + static_cast<int64_t>(bytes.size()); ++at) {
    const int64_t piece = at / part_bytes;
    const TensorId part = parts[piece % count];
    if (runs.empty() || at % part_bytes == 0) {
      runs.push_back({part, piece / count * part_bytes + at % part_bytes, {}});
    }
    runs.back().bytes.push_back(bytes[at - offset]);
  }
  return runs;
}

TEST(TransferTest, ClientTensorsBecomeShardsForEveryChunkSize) {
  for (const ValidRequest& request : FormRequests()) {
    for (int64_t chunk_bytes :
         {int64_t{1} << 10, int64_t{7001}, int64_t{1} << 20, int64_t{16} << 20}) {
      const ShardPlan plan = MakeShardPlan(request.spec, Layout::kZigzag, 3);
      const auto expected = RandomShards(request, plan, request.inputs);
      UploadRouter router(request, plan, Limits());
      std::map<std::pair<TensorId, int>, std::string> locals;
      for (const auto& [place, bytes] : expected) locals[place].resize(bytes.size());
      size_t messages = 0;
      for (TensorId id : request.inputs) {
        const std::string whole = Whole(request, plan, id, expected, 'h');
        for (size_t at = 0; at < whole.size(); at += chunk_bytes) {
          const std::string data = whole.substr(at, chunk_bytes);
          wire::ChunkHeader header{static_cast<int>(id), at,
                                   wire::Crc32c(data.data(), data.size())};
          std::vector<RoutedChunk> routed;
          const auto failure = router.Route(header, Slices(data, 5000), &routed);
          ASSERT_FALSE(failure.has_value()) << failure->message;
          messages += routed.size();
          for (const RoutedChunk& part : routed) {
            wire::ChunkHeader local;
            const std::string payload = PayloadOf(part.message, wire::kExchangeRequest, &local);
            if (local.crc32c) {
              EXPECT_EQ(*local.crc32c, wire::Crc32c(payload.data(), payload.size()));
            }
            // Complete packed tensors are passed on unchanged.
            EXPECT_EQ(local.tensor, static_cast<int>(id));
            for (const auto& [part_id, offset, bytes] :
                 PartRuns(request, id, static_cast<int64_t>(local.offset), payload)) {
              locals[{part_id, part.rank}].replace(offset, bytes.size(), bytes);
            }
          }
        }
      }
      EXPECT_TRUE(router.complete());
      EXPECT_EQ(router.received_bytes(), router.total_bytes());
      EXPECT_EQ(locals, expected);
      EXPECT_GT(messages, 0u);
    }
  }
}

TEST(TransferTest, ShardsBecomeClientTensorsForEveryChunkSize) {
  for (const ValidRequest& request : FormRequests()) {
    for (int64_t chunk_bytes :
         {int64_t{1} << 10, int64_t{7001}, int64_t{1} << 20, int64_t{16} << 20}) {
      const ShardPlan plan = MakeShardPlan(request.spec, Layout::kZigzag, 3);
      const auto shards = RandomShards(request, plan, request.outputs);
      // Less than a block: the next byte due must be read nevertheless.
      DownloadMerger merger(request, plan, wire::kForwardResponse, chunk_bytes, true, 4096);
      struct Piece {
        wire::ChunkHeader header;
        std::string data;
      };
      std::vector<std::vector<Piece>> streams(plan.world_size);
      std::map<TensorId, std::string> expected, merged;
      for (TensorId id : request.outputs) {
        const TensorRoute route(request.spec, plan, id);
        expected[id] = Whole(request, plan, id, shards, 0);
        route.ForEachHole([&](int64_t offset, int64_t bytes) {
          for (int64_t at = offset; at < offset + bytes; at += 4) {
            expected[id].replace(at, 4, std::string("\x00\x00\x80\xff", 4));
          }
        });
        for (int rank = 0; rank < plan.world_size; ++rank) {
          for (const LocalRange& range : route.StreamOrder(rank)) {
            const TensorId part = route.parts()[range.part];
            for (int64_t done = 0; done < range.bytes; done += 3000) {
              const int64_t at = range.offset + done;
              streams[rank].push_back(
                  {{static_cast<int>(part), static_cast<uint64_t>(at), {}},
                   shards.at({part, rank})
                       .substr(at, std::min<int64_t>(3000, range.bytes - done))});
            }
          }
        }
      }
      std::vector<size_t> at(plan.world_size, 0);
      std::mt19937 random(3);
      int64_t waiting = 0;
      for (int idle = 0; !merger.done(); ++idle) {
        ASSERT_LT(idle, 1000000) << "stuck";
        const int rank = static_cast<int>(random() % plan.world_size);
        if (at[rank] < streams[rank].size() && merger.HasRoom(rank)) {
          const Piece& piece = streams[rank][at[rank]++];
          waiting += piece.data.size();
          ASSERT_TRUE(merger.Add(rank, piece.header, Slices(piece.data, 1100)).ok());
        }
        while (auto chunk = merger.Next()) {
          wire::ChunkHeader header;
          const std::string payload = PayloadOf(chunk->message, wire::kForwardResponse, &header);
          EXPECT_EQ(header.crc32c, wire::Crc32c(payload.data(), payload.size()));
          std::string& target = merged[static_cast<TensorId>(header.tensor)];
          EXPECT_EQ(header.offset, target.size());
          target += payload;
          waiting -= payload.size();
        }
        EXPECT_LE(waiting, chunk_bytes + 3 * (3 * kStreamBlockBytes + 8192));
      }
      EXPECT_EQ(merger.sent_bytes(), merger.total_bytes());
      EXPECT_EQ(merged, expected);
    }
  }
}

TEST(TransferTest, UnexpectedChunksOfMembersAreDetected) {
  const ValidRequest request = MakeRequest(1, 8, 8, 1, 4, DType::kFloat32);
  const ShardPlan plan = MakeShardPlan(request.spec, Layout::kContiguous, 2);
  DownloadMerger merger(request, plan, wire::kForwardResponse, 1 << 20, false, 1 << 20);
  const auto add = [&](wire::ChunkHeader header, size_t bytes) {
    return merger.Add(0, header, Slices(std::string(bytes, 'x'), 1000)).code();
  };
  const int out = static_cast<int>(TensorId::kOut), lse = static_cast<int>(TensorId::kLse);
  EXPECT_EQ(add({out, 16, {}}, 16), absl::StatusCode::kInternal);  // a gap
  EXPECT_EQ(add({lse, 0, {}}, 16), absl::StatusCode::kInternal);   // the wrong tensor first
  EXPECT_EQ(add({out, 0, {}}, 65), absl::StatusCode::kInternal);   // more than the shard
  EXPECT_EQ(add({out, 0, {}}, 0), absl::StatusCode::kInternal);    // empty
  EXPECT_EQ(add({out, 0, {}}, 64), absl::StatusCode::kOk);
  EXPECT_EQ(add({out, 0, {}}, 64), absl::StatusCode::kInternal);  // repeated
  EXPECT_EQ(add({lse, 0, {}}, 16), absl::StatusCode::kOk);
  EXPECT_EQ(add({lse, 16, {}}, 16), absl::StatusCode::kInternal);  // past the end

  const std::string data(64, 'x');
  const uint32_t crc = wire::Crc32c(data.data(), data.size());
  EXPECT_TRUE(DownloadMerger::CrcMatches({out, 0, {}}, Slices(data, 10)));
  EXPECT_TRUE(DownloadMerger::CrcMatches({out, 0, crc}, Slices(data, 10)));
  EXPECT_FALSE(DownloadMerger::CrcMatches({out, 0, crc ^ 1}, Slices(data, 10)));
}

// Add does not check crcs, so the test uses arbitrary values to identify them.
TEST(TransferTest, TheCrcOfAWholeChunkIsForwarded) {
  const ValidRequest request = MakeRequest(1, 64, 64, 1, 4, DType::kFloat32);
  const ShardPlan plan = MakeShardPlan(request.spec, Layout::kContiguous, 1);
  const int out = static_cast<int>(TensorId::kOut), lse = static_cast<int>(TensorId::kLse);
  const std::string kilobyte(1024, 'x');
  const auto crc_of = [&](size_t bytes) { return wire::Crc32c(kilobyte.data(), bytes); };
  struct Piece {
    wire::ChunkHeader header;
    size_t bytes;
  };
  const auto merged = [&](const std::vector<Piece>& pieces) {
    DownloadMerger merger(request, plan, wire::kForwardResponse, 512, true, 1 << 20);
    for (const Piece& piece : pieces) {
      EXPECT_TRUE(merger.Add(0, piece.header, Slices(kilobyte.substr(0, piece.bytes), 100)).ok());
    }
    std::vector<uint32_t> crcs;
    while (auto chunk = merger.Next()) {
      wire::ChunkHeader header;
      PayloadOf(chunk->message, wire::kForwardResponse, &header);
      crcs.push_back(header.crc32c.value());
    }
    EXPECT_TRUE(merger.done());
    return crcs;
  };
  const Piece last{{lse, 0, 3}, 256};
  EXPECT_EQ(merged({{{out, 0, 1}, 512}, {{out, 512, 2}, 512}, last}),
            (std::vector<uint32_t>{1, 2, 3}));
  // Two chunks merged, one split, one overlapping, and one without a crc.
  const std::vector<uint32_t> computed{crc_of(512), crc_of(512), 3};
  EXPECT_EQ(merged({{{out, 0, 1}, 1024}, last}), computed);
  EXPECT_EQ(merged({{{out, 0, 1}, 256}, {{out, 256, 2}, 256}, {{out, 512, {}}, 512}, last}),
            computed);
  EXPECT_EQ(merged({{{out, 0, 1}, 700}, {{out, 700, 2}, 324}, last}), computed);
}

TEST(TransferTest, LargePiecesAreReferencedAndSmallOnesCopied) {
  // One row is 8 * 128 * 4 = 4 KiB, above the threshold.
  const ValidRequest request = MakeRequest(1, 64, 64, 8, 128, DType::kFloat32);
  const ShardPlan plan = MakeShardPlan(request.spec, Layout::kStriped, 2);
  UploadRouter router(request, plan, Limits());
  const grpc::Slice slice(std::string(64 * 4096, 'x'));
  std::vector<RoutedChunk> routed;
  ASSERT_FALSE(router.Route({1, 0, {}}, {slice}, &routed).has_value());
  ASSERT_EQ(routed.size(), 2u);
  std::vector<grpc::Slice> parts;
  ASSERT_TRUE(routed[0].message.Dump(&parts).ok());
  ASSERT_EQ(parts.size(), 33u);  // a prefix and 32 rows
  for (size_t i = 1; i < parts.size(); ++i) {
    EXPECT_GE(parts[i].begin(), slice.begin());
    EXPECT_LE(parts[i].end(), slice.end());
  }

  const ValidRequest tiny = MakeRequest(1, 4096, 4096, 1, 1, DType::kBFloat16);
  const ShardPlan tiny_plan = MakeShardPlan(tiny.spec, Layout::kStriped, 2);
  UploadRouter tiny_router(tiny, tiny_plan, Limits());
  routed.clear();
  ASSERT_FALSE(
      tiny_router.Route({1, 0, {}}, {grpc::Slice(std::string(8192, 'y'))}, &routed).has_value());
  ASSERT_EQ(routed.size(), 2u);
  ASSERT_TRUE(routed[1].message.Dump(&parts).ok());
  EXPECT_LE(parts.size(), 3u);  // instead of 2,048 rows of two bytes
}

// A worker's outputs, sent in its Finished.
TEST(InlinePlaneTest, CutsOutputsIntoTheClientsChunks) {
  TransferSpec spec;
  spec.request = MakeRequest(1, 40, 40, 2, 8, DType::kFloat32);
  spec.shards = MakeShardPlan(spec.request.spec, Layout::kContiguous, 1);
  spec.reply.max_chunk_bytes = 1000;
  spec.reply.with_crc32c = true;
  std::map<TensorId, std::string> tensors;
  google::protobuf::RepeatedPtrField<v1::TensorChunk> outputs;
  for (TensorId id : spec.request.outputs) {
    tensors[id] = RandomBytes(BytesOf(spec.request.spec, id), static_cast<uint32_t>(id));
    v1::TensorChunk* chunk = outputs.Add();
    chunk->set_tensor(static_cast<v1::TensorId>(id));
    chunk->set_data(tensors[id]);
  }
  InlinePlane plane(spec.direction, spec.request, spec.reply, spec.shards);
  const auto chunks = plane.Cut(outputs);
  ASSERT_TRUE(chunks.ok()) << chunks.status();
  std::map<TensorId, std::string> received;
  for (const DownloadMerger::Chunk& chunk : *chunks) {
    wire::ChunkHeader header;
    const std::string payload = PayloadOf(chunk.message, wire::kForwardResponse, &header);
    EXPECT_LE(payload.size(), 1000u);
    EXPECT_EQ(header.crc32c, wire::Crc32c(payload.data(), payload.size()));
    std::string& tensor = received[static_cast<TensorId>(header.tensor)];
    EXPECT_EQ(header.offset, tensor.size());
    tensor += payload;
  }
  EXPECT_EQ(received, tensors);
  const TransferTotals totals = plane.totals();
  EXPECT_EQ(totals.bytes_up, 3 * 40 * 2 * 8 * 4);
  EXPECT_EQ(totals.received_bytes, totals.bytes_up);
  EXPECT_EQ(totals.sent_bytes, totals.bytes_down);
}

TEST(InlinePlaneTest, RejectsOtherOutputs) {
  TransferSpec spec;
  spec.request = MakeRequest(1, 4, 4, 1, 8, DType::kFloat32);
  spec.shards = MakeShardPlan(spec.request.spec, Layout::kContiguous, 1);
  spec.reply.max_chunk_bytes = 1000;
  google::protobuf::RepeatedPtrField<v1::TensorChunk> outputs;
  EXPECT_FALSE(InlinePlane(spec.direction, spec.request, spec.reply, spec.shards)
                   .Cut(outputs)
                   .ok());  // incomplete
  v1::TensorChunk* chunk = outputs.Add();
  chunk->set_tensor(v1::TENSOR_ID_OUT);
  chunk->set_data(std::string(4 * 8 * 4 + 1, 'x'));
  EXPECT_FALSE(InlinePlane(spec.direction, spec.request, spec.reply, spec.shards)
                   .Cut(outputs)
                   .ok());  // too long
  chunk->set_tensor(v1::TENSOR_ID_DQ);
  EXPECT_FALSE(InlinePlane(spec.direction, spec.request, spec.reply, spec.shards)
                   .Cut(outputs)
                   .ok());  // no output
}

}  // namespace
}  // namespace ringattn::server
