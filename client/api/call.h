// Arguments, options and results of one attention call.
//
// Tensors stay in the caller's memory. The library sends inputs from it and writes outputs to it
// without an intermediate copy, except where TransportPreference says that tensors are staged.
#ifndef RINGATTN_CLIENT_API_CALL_H_
#define RINGATTN_CLIENT_API_CALL_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ringattn/v1/attention.pb.h"
#include "ringattn/v1/tensor.pb.h"

namespace ringattn::client {

// Tensor memory: row-major and little-endian, in the shapes of proto/ringattn/v1/tensor.proto.
// Host memory, or an address in a CudaRegion. The caller owns it.
using ConstBytes = absl::Span<const uint8_t>;
using MutableBytes = absl::Span<uint8_t>;

template <typename T>
ConstBytes BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(T)};
}

template <typename T>
MutableBytes MutableBytesOf(std::vector<T>& values) {
  return {reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(T)};
}

// Tensors that only some requests have, by id. An entry whose request does not have the tensor is
// an error.
//   inputs    SINKS, BIAS, MASK, Q_SEGMENT_IDS, KV_SEGMENT_IDS: where AttentionOptions asks for
//   them
//             QKV, or KV: where shape.packing asks for them; q, k and v, or k and v, are then empty
//             DLSE: Backward only; its presence makes it part of the request
//   outputs   PROBABILITIES: Forward with probability_rows
//             DSINKS, DBIAS, DQKV, DKV: Backward, where the matching input is there
template <typename Bytes>
using TensorMap = std::map<v1::TensorId, Bytes>;

// Inputs of a forward pass.
struct ForwardArgs {
  v1::AttentionShape shape = {};
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  // Type of out: `dtype`, or FLOAT32.
  v1::DataType output_dtype = v1::DATA_TYPE_UNSPECIFIED;
  // Layout of lse; other than the default only with packed documents.
  v1::LseFormat lse_format = v1::LSE_FORMAT_UNSPECIFIED;
  v1::AttentionOptions options = {};
  v1::PlanOptions plan = {};
  // Rows whose softmax weights are returned as the output PROBABILITIES.
  std::vector<v1::ProbabilityRow> probability_rows = {};
  ConstBytes q = {}, k = {}, v = {};
  TensorMap<ConstBytes> more = {};
};

// Memory for the outputs of a forward pass. lse is fp32.
struct ForwardResults {
  MutableBytes out;
  MutableBytes lse;
  TensorMap<MutableBytes> more = {};
};

// Inputs of a backward pass.
struct BackwardArgs {
  v1::AttentionShape shape = {};
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  // Type of dq, dk and dv, and of out where it is an input: `dtype`, or FLOAT32.
  v1::DataType output_dtype = v1::DATA_TYPE_UNSPECIFIED;
  // Layout of lse and of DLSE; other than the default only with packed documents.
  v1::LseFormat lse_format = v1::LSE_FORMAT_UNSPECIFIED;
  v1::AttentionOptions options = {};
  v1::PlanOptions plan = {};
  ConstBytes q = {}, k = {}, v = {}, dout = {};
  // CallReport::residual_handle() of the Forward. The workers then already hold all inputs except
  // dout and DLSE, and only those are sent. shape, dtype, output_dtype and options must equal the
  // Forward's. The other tensors may be omitted, all of them. If they are given and the residual
  // no longer exists, the library replays the call with the tensors and reports the reason in
  // CallReport::residual_failure.
  std::string residual_handle = {};
  // Keeps the residual for another Backward. Requires residual_handle.
  bool keep_residual = false;
  // True: `out` and `lse` are inputs. False: the server recomputes them.
  bool has_forward_result = false;
  ConstBytes out = {}, lse = {};
  TensorMap<ConstBytes> more = {};
};

// Memory for the outputs of a backward pass.
struct BackwardResults {
  MutableBytes dq, dk, dv;
  TensorMap<MutableBytes> more = {};
};

// Which transport the library prefers for a call's tensors.
enum class TransportPreference {
  // The first of these that is available:
  //   CUDA memory   all tensors lie in CUDA regions (cuda_region.h)
  //   host memory   all tensors lie in host regions (region.h), or the inputs have more than 64 KiB
  //                 and the tensors fit a staging region that is ready. The library creates staging
  //                 regions in the background from a client's second such call on
  //                 (ClientOptions::staging_bytes).
  //   direct        the tensors have at least 1 MiB and the workers are reachable
  //   relay
  kAuto,
  // Through the coordinator.
  kRelay,
  // Streams straight to the workers.
  kDirect,
  // Host memory. Tensors outside regions are staged.
  kHostMemory,
  // CUDA memory, if all tensors lie in CUDA regions. With any other outcome or preference, tensors
  // in CUDA regions are copied through host memory.
  kCudaMemory,
};

struct CallOptions {
  // The same for every replay of the call. Generated if empty.
  std::string request_id = {};
  // Forward only. Asks the workers to keep the inputs and results this long for a Backward
  // (BackwardArgs::residual_handle). 0: the server's default. The Forward succeeds even if nothing
  // can be kept. Backward returns INVALID_ARGUMENT if it is set.
  std::optional<absl::Duration> retain = {};
  // Set if several clients send and receive the tensors of one request (Writer in attention.proto):
  // all buffers of the call then hold this client's rows only, and `shape` is that of the whole
  // request. Every writer makes the call, with the same request_id, which is required, and with
  // equal arguments. The call returns when all writers' outputs are complete, or with the same
  // error in all of them. INVALID_ARGUMENT with packing, lse per document, probability_rows or
  // kRelay.
  std::optional<v1::Writer> writer = {};
  TransportPreference transport = TransportPreference::kAuto;
  // With kDirect, kHostMemory and kCudaMemory: the call fails with FAILED_PRECONDITION,
  // TRANSPORT_UNAVAILABLE instead of using another transport. If a worker has just joined, the
  // library attaches the tensors' regions to it and replays the call.
  bool transport_required = false;
  // Covers the call with all its replays, from its start.
  absl::Duration deadline = absl::InfiniteDuration();
  // Called on the library's threads, one call at a time. Must not block.
  std::function<void(const v1::Progress&)> on_progress = {};
  absl::Duration progress_interval = absl::Milliseconds(200);
  // Called once for each attempt that the service accepts, with its plan. As on_progress.
  std::function<void(const v1::Accepted&)> on_accepted = {};
  // Asks for the timeline of every rank, in CallReport::summary.
  bool with_timeline = false;
  // W3C trace context of the call, "00-...". It is sent with every request of the call and appears
  // in the service's logs, on its status page and in CallReport::accepted. INVALID_ARGUMENT if it
  // is malformed.
  std::string traceparent = {};
  // Protects every chunk in both directions by a CRC-32C.
  bool with_crc32c = true;
};

// Milestones of the attempt that succeeded, in seconds since `began`. For a call that copies its
// tensors, `began` is the start of the copies in and `finished_seconds` the end of the copies out,
// both without failed attempts.
struct ClientTimes {
  std::chrono::steady_clock::time_point began = {};
  double accepted_seconds = 0;
  double uploaded_seconds = 0;      // the last chunk was handed to the transport
  double first_output_seconds = 0;  // 0: no chunk was received
  double finished_seconds = 0;
};

struct CallReport {
  v1::Accepted accepted;
  v1::Summary summary;
  ClientTimes times;
  // Why the call used accepted.transport(): the service's explanation, or the library's where it
  // offered nothing else.
  std::string transport_reason = {};
  // The attempts before the one that succeeded, with the pauses after them; and the failure of the
  // last of them, or OK.
  double failed_seconds = 0;
  absl::Status last_failure = absl::OkStatus();
  // Bytes that the library copied into and out of staging memory.
  uint64_t staged_bytes = 0;
  // Backward: ErrorInfo.reason, e.g. "RESIDUAL_LOST", if the residual could not be read and the
  // tensors were sent instead. Empty if the residual was read or the call named none.
  std::string residual_failure = {};

  // Forward with CallOptions::retain: the handle of what the workers keep, or the reason why they
  // keep nothing.
  const std::string& residual_handle() const { return summary.residual_handle(); }
  const std::string& residual_reason() const { return summary.residual_reason(); }
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_API_CALL_H_
