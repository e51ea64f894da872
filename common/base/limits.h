// All limits of the service's interface, each with its arithmetic. GetServerInfo reports them.
// Requests above a limit get RESOURCE_EXHAUSTED before any tensor byte is transferred. (Timeouts
// between coordinator and workers: CoordinatorConfig.)
#ifndef RINGATTN_COMMON_BASE_LIMITS_H_
#define RINGATTN_COMMON_BASE_LIMITS_H_

#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"

namespace ringattn {

inline constexpr int64_t kKiB = 1024;
inline constexpr int64_t kMiB = 1024 * kKiB;
inline constexpr int64_t kGiB = 1024 * kMiB;

// Chunks of a tensor that arrive out of order leave gaps. Each range between gaps takes about 64
// bytes (ByteRangeSet): 16 MiB per tensor. A client that shuffles 1 MiB chunks of the largest
// tensor leaves fewer than 2^18 ranges; one that sends every second byte is stopped here. A rank's
// share of a chunk is one range, so workers hold no more.
inline constexpr size_t kMaxRangesPerTensor = size_t{1} << 18;

// The widest row of q, k or v that the kernels hold in registers, on the stack or in shared memory:
// the keys of multi-head latent attention in its absorbed form (512 and 64 for the positions).
inline constexpr int64_t kMaxHeadDim = 576;

// A run pauses for small requests at most this long at a time, even if their predictions were far
// too low. Its peers wait meanwhile, so this is far below every limit on progress.
inline constexpr absl::Duration kLongestPause = absl::Seconds(1);

// Limit on the inputs, and on the outputs, of an operation whose tensors travel in control
// messages. They delay other messages of the worker by 0.1 ms at 10 Gbit/s, and eight operations
// per worker (max_operations_per_worker) occupy at most 2 MiB of the coordinator's memory.
inline constexpr int64_t kMaxInlineRunBytes = 128 * kKiB;

// The same for all tensors of an operation whose tensors are in the client's memory. A GPU copies
// them in 5 ms at 55 GB/s, and its worker starts no other run while it waits for the last copy.
inline constexpr int64_t kMaxInlineCopyBytes = 256 * kMiB;

// A worker keeps operations that have ended for equal requests. The operations that a worker holds
// at a time are at most eight (max_operations_per_worker), so 32 serve four clients that each
// repeat a forward and a backward, with all eight places in use. The lists of documents of an
// operation take at most 8 MiB of host memory in the message and the program: 512 MiB for 32 of the
// largest.
inline constexpr size_t kMaxKeptOperations = 32;
// Kept operations take at most a quarter of the worker's memory for requests. Anything that needs
// the memory evicts them, so this bounds only how much has to be freed then.
inline constexpr int64_t kKeptMemoryDivisor = 4;
// Longer than the optimizer's part of a training step, so that the next step finds the operations.
inline constexpr absl::Duration kPreparedLease = absl::Seconds(30);

struct Limits {
  // --- Shapes. Validation saturates the product of the dimensions and compares it with
  // max_tensor_bytes (2^38), so no size of a valid tensor overflows int64. Neither do the 2^54
  // pairs of a sequence with itself.
  int64_t max_tokens = int64_t{1} << 27;  // per axis; 128 times the longest benchmark
  // Kernels have one plane of a launch's grid per batch row: at most 65,535. The limits on bytes
  // apply to many rows as to long ones.
  int64_t max_batch = 65535;
  int64_t max_heads = 1024;
  int64_t max_head_dim = kMaxHeadDim;
  // 1M tokens, 32 heads, d 128, bf16 is 8 GiB: room for 32 times that in one tensor,
  // and for four such tensors among the inputs and outputs of one request.
  int64_t max_probability_rows = 4096;  // ReplyOptions.probability_rows
  int64_t max_tensor_bytes = 256 * kGiB;
  int64_t max_request_bytes = 1024 * kGiB;
  // Two lists, at most 4 bytes an entry (a varint below 2^28): 2 MiB. With 1 MiB of
  // inline tensors a header stays below the 4 MiB that stock gRPC peers accept.
  int64_t max_documents = int64_t{1} << 18;
  // Dilated attention. LongNet has five levels. A plan has a document for each segment of each
  // offset, so their total has the same limit as documents.
  int64_t max_dilation_levels = 64;
  int64_t max_dilated_segments = int64_t{1} << 18;
  // Levels times the offsets that have heads (DilatedPartCount). Each of these parts has a program
  // of its own on each rank. On four ranks planning takes 0.2 to 0.3 ms per part: 0.3 s. Five
  // levels of LongNet with rates of 1 to 16 are 31 parts.
  int64_t max_dilated_parts = 1024;
  // Planning visits every pair of ranks (2^12 pairs). For everything within the limits above, a
  // ring of 64 already spends more time on hops than on computation.
  int max_world_size = 64;

  // --- Messages.
  int64_t max_inline_bytes = kMiB;  // all inline tensors of a header together
  int64_t max_header_bytes = 4 * kMiB;
  // Upload, accepted: each stream may have two of them in memory.
  int64_t max_chunk_bytes_up = 16 * kMiB;
  // Upload, recommended: amortises a message's cost and fits the caches while gRPC, the coordinator
  // and the worker process adjacent chunks concurrently. Whole chunks of 16 MiB wait for one
  // another and are three times slower.
  int64_t recommended_chunk_bytes = kMiB;
  // Download: a stock client rejects messages above 4 MiB in total.
  int64_t max_chunk_bytes_down_default = kMiB;
  // Smaller chunks would spend more bytes on framing than on data.
  int64_t min_chunk_bytes_down = kKiB;
  // One chunk and its envelope: tensor, offset, crc32c and two lengths take less than 64 bytes.
  int64_t max_message_bytes = max_chunk_bytes_up + 64 * kKiB;
  // The service reads client messages up to twice this size, only to reject them with a detailed
  // error. gRPC itself rejects larger ones with RESOURCE_EXHAUSTED without details.
  int64_t max_refused_message_bytes = 2 * max_message_bytes;
  int64_t max_request_id_bytes = 128;
  // Details are sent in HTTP/2 trailers: 7,000 bytes pass, 9,000 hide the real code.
  int64_t max_error_detail_bytes = 4 * kKiB;

  // --- Queue. Waiting requests hold a header each (at most 4 MiB), so 256 of them stay below 1
  // GiB. The bytes are those that they will upload, not memory.
  int64_t max_queued_requests = 256;
  int64_t max_queued_bytes = 64 * kGiB;
  // One client's share: half, so that other clients always find space.
  int64_t max_queued_requests_per_client = 128;
  int64_t max_queued_bytes_per_client = 32 * kGiB;
  // Reports that GetStatus keeps, without tensors or token positions: at most 64 ranks of 160 bytes
  // (two spans of 24 in vectors of 24, four counts, a name) and some text, 11 KiB; for one rank 600
  // bytes. For rings above 40 the limit on bytes applies first.
  int64_t finished_operations_kept = 1024;
  int64_t finished_operation_bytes = 8 * kMiB;  // in total

  // --- Streams: open Forward and Backward calls. About 20 KiB each before their header, a few MiB
  // in total. With a header: as many as may wait, and as many again that are served or end.
  // Calls without a header have a separate limit; above it the oldest is ended. A client sends the
  // header with the call, so only clients that withhold it are affected.
  int64_t max_streams_without_header = 256;
  // Half the queue, so that one client cannot fill it.
  int64_t max_streams_per_client = 128;
  int64_t max_streams_per_connection = 128;
  // Calls in progress on a stream of AttentionService.Calls, which is not read beyond. By default
  // fewer than max_streams_per_connection, so that one such stream does not exceed that limit.
  int64_t max_calls_per_stream = 96;

  // --- Prepared requests (PrepareOptions). Clients renew at a third of the ttl, so the default
  // costs 6 short requests per minute and prepared part. A dead client's parts end with the ttl.
  absl::Duration default_prepare_ttl = absl::Seconds(30);
  absl::Duration max_prepare_ttl = absl::Minutes(10);

  // --- Residuals (RetainOptions). A limit over all workers, set by the operator. Requests that
  // need the memory may evict residuals (Residuals::EvictionOrder).
  int64_t max_residual_bytes = 256 * kGiB;
  absl::Duration default_residual_ttl = absl::Minutes(10);
  absl::Duration max_residual_ttl = absl::Hours(6);
  // HoldResiduals: the service renews holds at a third of residual_hold_ttl. residual_hold_grace is
  // the time after a stream's end in which the client may open its next stream (ResidualHold's
  // interval is 3 s).
  absl::Duration residual_hold_ttl = absl::Seconds(60);
  absl::Duration residual_hold_grace = absl::Seconds(10);
  int64_t max_residual_holds = 1024;  // streams
  int64_t max_residual_holds_per_client = 16;
  // The coordinator's record of a residual: about 3 KiB, and its document boundaries, at most 4
  // MiB. The layers of a model times its micro-batches are far fewer.
  int64_t max_residuals = 16384;
  int64_t max_residual_record_bytes = 256 * kMiB;
  // Ended residuals, kept so that a later request learns why they ended: about 200 bytes each.
  int64_t ended_residuals_kept = 16384;
  int64_t max_renewed_residuals = 1024;  // per call

  // --- K/V caches (kv_cache.proto).
  int64_t max_kv_caches = 4096;    // a record of about 4 KiB each, and its spec
  int64_t max_kv_cache_bytes = 0;  // of one client's caches; 0: only the workers' memory limits
  absl::Duration default_kv_ttl = absl::Seconds(60);
  absl::Duration max_kv_ttl = absl::Hours(6);
  int64_t max_step_rows = 4096;  // validation of a row takes 1 us: 4 ms
  // 64 heads of 256 in fp32 are 4 GiB, so max_step_bytes applies first
  int64_t max_step_tokens = 65536;
  int64_t max_sequences = 65536;  // per cache, 100 bytes each without their tables
  int64_t max_kv_layers = 1024;   // per cache
  int64_t max_kv_head_dim = 256;  // widest row of the kernels that read block tables
  // KvCacheSpec. Sinks take most of it: 4 bytes per layer and head, 64 KiB for 128 layers of 128.
  int64_t max_kv_spec_bytes = 256 * kKiB;
  int64_t max_kv_blocks = int64_t{1} << 24;  // per plane; a table entry is 4 bytes
  int64_t max_step_bytes = 64 * kMiB;        // one StepBegin or LayerCall; gRPC holds it in memory

  // --- Time.
  // From the call to its header: the largest, 4 MiB, at 0.4 MB/s.
  absl::Duration header_timeout = absl::Seconds(10);
  // An upload holds memory and a place at its workers. While the service could accept its bytes it
  // may lag behind this rate by upload_grace, or by upload_grace_contended while other requests
  // wait in the queue throughout; then it ends. 64 KiB/s is 0.5 Mbit/s. A chunk counts when it is
  // complete: 1 MiB within 5 s is 0.2 MB/s, so slower clients send smaller chunks.
  int64_t min_upload_bytes_per_second = 64 * kKiB;
  absl::Duration upload_grace = absl::Seconds(30);
  absl::Duration upload_grace_contended = absl::Seconds(5);
  // Reserved memory is held while a client uploads. A silence longer than any retransmission frees
  // it.
  absl::Duration upload_idle_timeout = absl::Seconds(30);
  // The same while a client downloads. Within this time a reader must read one chunk; for the
  // largest, 16 MiB, that is 0.6 MB/s.
  absl::Duration download_idle_timeout = absl::Seconds(30);
  // A failed call's status may be queued after a message that the client does not read. After this
  // time the call is cut off, and the client gets the code and message without the details.
  absl::Duration unread_status_timeout = absl::Seconds(10);
  // Deadline of requests without one: 128M tokens on CPUs end earlier or never.
  absl::Duration default_deadline = absl::Hours(6);
  absl::Duration max_deadline = absl::Hours(24);
  absl::Duration min_progress_interval = absl::Milliseconds(10);  // 100 messages per second

  // --- Host memory. A region is an entry of about 200 bytes here, and a mapping, a socket and a
  // descriptor at each worker. Descriptors run out first, at 1,024 in the worst case.
  int64_t max_regions = 512;
  int64_t max_regions_per_client = 64;
  // From Attach until the worker receives the descriptor: two messages on one machine.
  absl::Duration attach_token_time = absl::Seconds(10);

  // --- Direct streams. Accepted lists each member's spans, at most 12 bytes each: 48 KiB. Layouts
  // with more spans have short rows, which streams do not transfer faster.
  int64_t max_ticket_spans = 4096;
  // To one worker for one operation. One connection transfers a third of what four do; more than
  // eight transfer no more.
  int max_streams_per_ticket = 16;
  // OpenShard in a call's metadata: a token of 32 bytes or an operation's id, and a few numbers.
  int64_t max_open_shard_bytes = kKiB;
  // All metadata of a client's call to a worker: the largest OpenShard, 0.7 KiB of gRPC's own by
  // its count, and room for additions by proxies.
  int64_t max_client_metadata_bytes = 4 * kKiB;

  // --- Writers. One request of several clients.
  int max_writers = 64;
  // From the first writer's header until all have joined. A training rank that compiles a kernel or
  // saves a checkpoint is minutes late. A waiting stream holds no memory of workers.
  absl::Duration writer_join_timeout = absl::Minutes(10);

  // --- Planning. At 32,768 tokens one device finishes within the time that a ring takes to fill.
  // Small requests run concurrently instead.
  int64_t single_device_threshold_tokens = 32768;
  // Between hosts whose link is not measured: 10 Gbit/s, which every data centre's network exceeds.
  // A value that is too low keeps requests on one host.
  int64_t default_host_link_bytes_per_second = 1'250'000'000;
  // The longest valid lists take a few seconds on one core, once.
  absl::Duration planning_time_max = absl::Seconds(10);
  // Plans of earlier requests, reused for equal ones: 3 KiB each and their key, at most 4 MiB of
  // document boundaries.
  int64_t plan_cache_bytes = 64 * kMiB;
};

// The largest message that a worker reads: a chunk of a tensor, or a step of a K/V cache.
inline int64_t MaxServedMessageBytes(const Limits& limits) {
  const int64_t step = limits.max_step_bytes + 64 * kKiB;
  return step > limits.max_message_bytes ? step : limits.max_message_bytes;
}

}  // namespace ringattn

#endif  // RINGATTN_COMMON_BASE_LIMITS_H_
