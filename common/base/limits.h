// Every limit of the service's surface, each with its arithmetic. GetServerInfo
// reports them. Requests over one of them get RESOURCE_EXHAUSTED and never moved a
// tensor byte. (Timeouts between coordinator and workers: CoordinatorConfig.)
#ifndef RINGATTN_COMMON_BASE_LIMITS_H_
#define RINGATTN_COMMON_BASE_LIMITS_H_

#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"

namespace ringattn {

inline constexpr int64_t kKiB = 1024;
inline constexpr int64_t kMiB = 1024 * kKiB;
inline constexpr int64_t kGiB = 1024 * kMiB;

// Chunks of a tensor that arrive in any order leave gaps, and what lies between them is
// remembered in some 64 bytes each (ByteRangeSet): 16 MiB per tensor. A client that shuffles
// 1 MiB chunks of the largest tensor leaves fewer than 2^18; one that sends every second byte
// is stopped here. A rank's part of a chunk is one range, so workers hold no more.
inline constexpr size_t kMaxRangesPerTensor = size_t{1} << 18;

struct Limits {
  // --- Shapes. Together 2^27 tokens * 2^12 * 2^10 heads * 2^8 * 4 bytes = 2^59: no
  // product of legal dimensions overflows int64, and neither do the 2^54 pairs of
  // a sequence with itself.
  int64_t max_tokens = int64_t{1} << 27;  // per axis; 128 times the longest benchmark
  int64_t max_batch = 4096;
  int64_t max_heads = 1024;
  int64_t max_head_dim = 256;  // widest row that the kernels keep in registers
  // 1M tokens, 32 heads, d 128, bf16 is 8 GiB: room for 32 times that in one tensor,
  // and for four such tensors among the inputs and outputs of one request.
  int64_t max_probability_rows = 4096;  // ReplyOptions.probability_rows
  int64_t max_tensor_bytes = 256 * kGiB;
  int64_t max_request_bytes = 1024 * kGiB;
  // Two lists, at most 4 bytes an entry (a varint below 2^28): 2 MiB. With 1 MiB of
  // inline tensors a header stays below the 4 MiB that stock gRPC peers accept.
  int64_t max_documents = int64_t{1} << 18;
  // Of dilated attention. LongNet has five levels. A plan has a document for each segment of each
  // offset, so together they are bounded as documents are.
  int64_t max_dilation_levels = 64;
  int64_t max_dilated_segments = int64_t{1} << 18;
  // Every pair of ranks is planned for (2^12 pairs), and a ring of 64 already hops
  // longer than it computes for anything that fits the limits above.
  int max_world_size = 64;

  // --- Messages.
  int64_t max_inline_bytes = kMiB;  // all inline tensors of a header together
  int64_t max_header_bytes = 4 * kMiB;
  // Up, what is taken: each stream may have two of them in memory.
  int64_t max_chunk_bytes_up = 16 * kMiB;
  // Up, what is best: amortises a message's cost and passes through the caches while gRPC,
  // the coordinator and the worker handle neighbours side by side. Whole chunks of 16 MiB
  // wait for one another: three times slower.
  int64_t recommended_chunk_bytes = kMiB;
  // Down: a stock client refuses messages over 4 MiB in all.
  int64_t max_chunk_bytes_down_default = kMiB;
  // Smaller chunks would spend more on their framing than on bytes.
  int64_t min_chunk_bytes_down = kKiB;
  // One chunk and its envelope: tensor, offset, crc32c and two lengths are below 64
  // bytes.
  int64_t max_message_bytes = max_chunk_bytes_up + 64 * kKiB;
  // From clients twice as much is read, only to be refused by name: gRPC refuses what is
  // larger before anybody sees it, RESOURCE_EXHAUSTED without details.
  int64_t max_refused_message_bytes = 2 * max_message_bytes;
  int64_t max_request_id_bytes = 128;
  // Details travel in HTTP/2 trailers: 7,000 bytes pass, 9,000 hide the real code.
  int64_t max_error_detail_bytes = 4 * kKiB;

  // --- Queue. Waiting requests hold a header each (at most 4 MiB), so 256 of them
  // stay below 1 GiB; the bytes are what they will upload, not memory.
  int64_t max_queued_requests = 256;
  int64_t max_queued_bytes = 64 * kGiB;
  // One client's part of it: half, so that the others find places whatever it does.
  int64_t max_queued_requests_per_client = 128;
  int64_t max_queued_bytes_per_client = 32 * kGiB;
  // What GetStatus still knows. Of each a report without tensors or places of tokens: at
  // most 64 ranks of 160 bytes (two spans of 24 in vectors of 24, four counts, a name) and
  // some words, 11 KiB; of one rank 600 bytes. The bytes bind first for rings above 40.
  int64_t finished_operations_kept = 1024;
  int64_t finished_operation_bytes = 8 * kMiB;  // of all of them together

  // --- Streams: Forward and Backward calls that are open at a time. Some 20 KiB each
  // before their header, so a few MiB in all; with one, as many as may wait and as many
  // again that are served or end.
  // Those without a header yet have places of their own, and the oldest makes room: a
  // client sends the header with the call, so that only who holds it back stays here.
  int64_t max_streams_without_header = 256;
  // Half the queue: one client cannot fill it. Twice what one call can be split into.
  int64_t max_streams_per_client = 128;
  int64_t max_streams_per_connection = 128;

  // --- Residuals (RetainOptions). Of all workers together, a bound that the operator sets; what
  // requests need of it they get (Residuals::EvictionOrder).
  int64_t max_residual_bytes = 256 * kGiB;
  absl::Duration default_residual_ttl = absl::Minutes(10);
  absl::Duration max_residual_ttl = absl::Hours(6);
  // HoldResiduals: renewed at a third of the time; and for how long after the stream's end, which a
  // client's next stream must beat (ResidualHold's sign of life: 3 s).
  absl::Duration residual_hold_ttl = absl::Seconds(60);
  absl::Duration residual_hold_grace = absl::Seconds(10);
  int64_t max_residual_holds = 1024;  // streams
  int64_t max_residual_holds_per_client = 16;
  // What the coordinator keeps of each: some 3 KiB, and the boundaries of its documents, at most
  // 4 MiB. Layers of a model times its micro-batches are far fewer.
  int64_t max_residuals = 16384;
  int64_t max_residual_record_bytes = 256 * kMiB;
  // Of those that ended, so that who asks learns why: some 200 bytes each.
  int64_t ended_residuals_kept = 16384;
  int64_t max_renewed_residuals = 1024;  // by one call

  // --- K/V caches (kv_cache.proto).
  int64_t max_kv_caches = 4096;    // a record of some 4 KiB each, and its spec
  int64_t max_kv_cache_bytes = 0;  // of one client's caches; 0: only the workers' memory limits
  absl::Duration default_kv_ttl = absl::Seconds(60);
  absl::Duration max_kv_ttl = absl::Hours(6);
  int64_t max_step_rows = 4096;     // a row and its checks take 1 us: 4 ms
  int64_t max_step_tokens = 65536;  // 64 heads of 256 in fp32 make 4 GiB: max_step_bytes binds
  int64_t max_sequences = 65536;    // of one cache, 100 bytes each without their tables
  int64_t max_kv_layers = 1024;     // of one cache
  // KvCacheSpec. Sinks take most of it: 4 bytes per layer and head, 64 KiB for 128 layers of 128.
  int64_t max_kv_spec_bytes = 256 * kKiB;
  int64_t max_kv_blocks = int64_t{1} << 24;  // of one plane: a table entry is 4 bytes
  int64_t max_step_bytes = 64 * kMiB;        // one StepBegin or LayerCall; gRPC holds it in memory

  // --- Time.
  // From the call to its header: the largest, 4 MiB, at 0.4 MB/s.
  absl::Duration header_timeout = absl::Seconds(10);
  // An upload holds memory and a place at its workers. While its bytes could be taken it may
  // fall behind this rate by upload_grace, and by less while other requests wait in the
  // queue all the while; then it ends. 64 KiB/s is 0.5 Mbit/s. A chunk counts when it is
  // whole: 1 MiB within 5 s is 0.2 MB/s, so slower lines send smaller chunks.
  int64_t min_upload_bytes_per_second = 64 * kKiB;
  absl::Duration upload_grace = absl::Seconds(30);
  absl::Duration upload_grace_contended = absl::Seconds(5);
  // Reserved memory is held while a client uploads: longer silence than any
  // retransmission gives it back.
  absl::Duration upload_idle_timeout = absl::Seconds(30);
  // Likewise while a client downloads. Within it a reader must take a chunk; of the
  // largest, 16 MiB, that is 0.6 MB/s.
  absl::Duration download_idle_timeout = absl::Seconds(30);
  // A failed call's status may wait behind a message that the client does not take: then
  // the call is cut off, and the client gets code and words without the details.
  absl::Duration unread_status_timeout = absl::Seconds(10);
  // Requests without a deadline get this one: 128M tokens on CPUs end earlier or
  // never.
  absl::Duration default_deadline = absl::Hours(6);
  absl::Duration max_deadline = absl::Hours(24);
  absl::Duration min_progress_interval = absl::Milliseconds(10);  // 100 messages a second

  // --- Host memory. A region is an entry of some 200 bytes here and a mapping, a socket and a
  // descriptor at each worker; descriptors are what runs out first, at 1,024 in the worst case.
  int64_t max_regions = 512;
  int64_t max_regions_per_client = 64;
  // From Attach until the worker has the descriptor: two messages on one machine.
  absl::Duration attach_token_time = absl::Seconds(10);

  // --- Streams straight to workers. Accepted lists what each member has: at most 12 bytes a span,
  // 48 KiB. Layouts with more pieces have short rows, which streams move no faster.
  int64_t max_ticket_spans = 4096;
  // To one worker for one operation. One connection moves a third of what four do, and more than
  // eight no more.
  int max_streams_per_ticket = 16;
  // OpenShard in a call's metadata: a token of 32 bytes, or an operation's id, and a few numbers.
  int64_t max_open_shard_bytes = kKiB;
  // All metadata of a client's call to a worker: OpenShard's largest, 0.7 KiB of gRPC's own as it
  // counts them, and room for what proxies add.
  int64_t max_client_metadata_bytes = 4 * kKiB;

  // --- Planning. At 32,768 tokens one device finishes within the time that a ring
  // needs to fill; small requests run side by side instead.
  int64_t single_device_threshold_tokens = 32768;
  // The longest legal lists take some seconds on one core, once.
  absl::Duration planning_time_max = absl::Seconds(10);
  // Plans of earlier requests, kept for equal ones: 3 KiB each and what they follow from, at
  // most 4 MiB of document boundaries.
  int64_t plan_cache_bytes = 64 * kMiB;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_BASE_LIMITS_H_
