// What a call takes and gives. Tensors stay in the caller's memory throughout: inputs
// are sent from it and outputs are written to it, without a copy in between (but see
// CallOptions::streams and TransportPreference).
#ifndef RINGATTN_CLIENT_API_CALL_H_
#define RINGATTN_CLIENT_API_CALL_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ringattn/v1/attention.pb.h"
#include "ringattn/v1/tensor.pb.h"

namespace ringattn::client {

// Host memory, row-major and little-endian, in the shapes of
// proto/ringattn/v1/tensor.proto.
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

// Tensors by their id: those that only some requests have. Inputs: SINKS where the options
// have sinks, BIAS, MASK, Q_SEGMENT_IDS and KV_SEGMENT_IDS likewise, QKV or KV where shape.packing
// says so (q, k and v are then left out), and of Backward also DLSE, whose presence here makes it
// part of the request; outputs of Forward: PROBABILITIES; of Backward: DSINKS, DBIAS, DQKV or DKV.
// A call that has any cannot
// be split (CallOptions::streams).
template <typename Bytes>
using TensorMap = std::map<v1::TensorId, Bytes>;

// `Bytes`: what shows a tensor's memory.
template <typename Bytes>
struct BasicForwardArgs {
  v1::AttentionShape shape = {};
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  // Of out, dq, dk and dv, also where out is an input: `dtype` unless FLOAT32.
  v1::DataType output_dtype = v1::DATA_TYPE_UNSPECIFIED;
  // Packed documents only: of lse, and of dlse, both also where they are inputs.
  v1::LseFormat lse_format = v1::LSE_FORMAT_UNSPECIFIED;
  v1::AttentionOptions options = {};
  v1::PlanOptions plan = {};
  // Rows whose softmax weights come back, as result PROBABILITIES.
  std::vector<v1::ProbabilityRow> probability_rows = {};
  Bytes q = {}, k = {}, v = {};
  TensorMap<Bytes> more = {};
};
using ForwardArgs = BasicForwardArgs<ConstBytes>;

template <typename Bytes>
struct BasicForwardResults {
  Bytes out;
  Bytes lse;  // fp32
  TensorMap<Bytes> more = {};
};
using ForwardResults = BasicForwardResults<MutableBytes>;

template <typename Bytes>
struct BasicBackwardArgs {
  v1::AttentionShape shape = {};
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  // Of out, dq, dk and dv, also where out is an input: `dtype` unless FLOAT32.
  v1::DataType output_dtype = v1::DATA_TYPE_UNSPECIFIED;
  // Packed documents only: of lse, and of dlse, both also where they are inputs.
  v1::LseFormat lse_format = v1::LSE_FORMAT_UNSPECIFIED;
  v1::AttentionOptions options = {};
  v1::PlanOptions plan = {};
  Bytes q = {}, k = {}, v = {}, dout = {};
  // CallReport::residual_handle of the Forward: the workers have all inputs but dout and DLSE, and
  // only those are sent. shape, dtype, output_dtype and options must be the Forward's. The other
  // tensors may be left out, all of them; where they are given, the call is sent once more with
  // them should the residual be gone, and CallReport::residual_failure says why. Refused beside
  // CallOptions::streams.
  std::string residual_handle = {};
  bool keep_residual = false;  // for another Backward
  // True: `out` and `lse` are given too. False: the server computes them again.
  bool has_forward_result = false;
  Bytes out = {}, lse = {};
  TensorMap<Bytes> more = {};
};
using BackwardArgs = BasicBackwardArgs<ConstBytes>;

template <typename Bytes>
struct BasicBackwardResults {
  Bytes dq, dk, dv;
  TensorMap<Bytes> more = {};
};
using BackwardResults = BasicBackwardResults<MutableBytes>;

// Of CallOptions::streams. A coordinator's queue holds 256 requests.
inline constexpr int kMaxStreams = 64;

// How a call's tensors are to travel.
enum class TransportPreference {
  // By host memory if all of them lie in regions (region.h), or if they are 1 MiB or more and can
  // pass through one of the library's that is ready: such are made, in the background, from a
  // client's second such call on (ClientOptions::staging_bytes). Else straight to the workers if
  // they are a MiB and more and the workers can be reached, else by the coordinator.
  kAuto,
  kRelay,   // by the coordinator
  kDirect,  // straight to the workers; see CallOptions::transport_required
  kHost,    // by host memory, staged if need be; likewise
  // By CUDA memory if all tensors lie in regions of it (cuda_region.h); likewise. So does kAuto.
  // Where it cannot be had, and with the others above, tensors in such regions are copied through
  // host memory.
  kCuda,
};

struct CallOptions {
  // The same for every replay of the call. Made up if empty.
  std::string request_id = {};
  // More than 1: the call is sent as up to so many requests side by side (its batch
  // rows, packed documents, blocks of queries or, backward, groups of heads), named
  // <request_id>/0, /1, ... for GetStatus and Cancel. Each takes the
  // client's next channel, so give the client as many; uploads, computation and
  // downloads of different requests overlap.
  // Results are the same up to rounding. Blocks of queries send the keys again that they
  // share, and lse of documents and blocks passes through a buffer of its size; chunks of
  // groups of heads, which lie between the others', through one of theirs.
  // Which calls cannot be split, and how: call_split.h. How many requests it was:
  // CallReport::streams().
  int streams = 1;
  // Forward: its inputs and results stay with the workers for this long, for a Backward that reads
  // them (BackwardArgs::residual_handle); 0: for as long as the server thinks right. A Forward does
  // not fail because they cannot be kept. INVALID_ARGUMENT beside `streams`, and for Backward.
  std::optional<absl::Duration> retain = {};
  // Of tensors in regions a call is one request, whatever `streams` says. With `streams` and
  // kAuto nothing is staged.
  TransportPreference transport = TransportPreference::kAuto;
  // With kDirect, kHost and kCuda: FAILED_PRECONDITION, TRANSPORT_UNAVAILABLE rather than by the
  // coordinator. A worker that has just joined is shown the tensors' regions, and the call
  // replayed.
  bool transport_required = false;
  // For the call with all its replays, counted from its start.
  absl::Duration deadline = absl::InfiniteDuration();
  // Called on the library's threads, one call at a time; must not block.
  std::function<void(const v1::Progress&)> on_progress = {};
  absl::Duration progress_interval = absl::Milliseconds(200);
  // The timeline of every rank, in CallReport::summary.
  bool with_timeline = false;
  // W3C trace context that the call belongs to, "00-...": sent with every request of it, and found
  // in the service's logs, its live page and CallReport::accepted. INVALID_ARGUMENT if it is not
  // valid (trace_context.h).
  std::string traceparent = {};
  // A CRC-32C over every chunk, both ways.
  bool with_crc32c = true;
};

// Moments of the attempt that succeeded, in seconds since it began. Of a call in
// several streams: the first to be accepted, the last to be uploaded, the first
// output, the last to finish, since the first began. Of a staged call: since its tensors began to
// be copied, until its results were.
struct ClientTimes {
  std::chrono::steady_clock::time_point began = {};
  double accepted_seconds = 0;
  double uploaded_seconds = 0;      // the last chunk was handed to the transport
  double first_output_seconds = 0;  // 0 if there was no chunk down
  double finished_seconds = 0;
};

struct CallReport {
  v1::Accepted accepted;
  v1::Summary summary;
  ClientTimes times;
  // Why the tensors travelled as `accepted.transport()` says: the service's words, or this
  // library's where it did not ask for anything else.
  std::string transport_reason = {};
  // Copied by this library into and out of regions of its own, as the tensors lay in none.
  uint64_t staged_bytes = 0;
  // Of a call in several streams: each request's own report, in order of rows; the
  // fields above are then what merged_report.h makes of them. Else empty.
  std::vector<CallReport> parts = {};
  // Backward: the reason (ErrorInfo) for which the residual could not be read and the tensors were
  // sent instead, e.g. "RESIDUAL_LOST". Empty: it was read, or there was none.
  std::string residual_failure = {};

  // Forward with CallOptions::retain: what was kept, or else why nothing was.
  const std::string& residual_handle() const { return summary.residual_handle(); }
  const std::string& residual_reason() const { return summary.residual_reason(); }
  // The requests that the call was sent as: what CallOptions::streams asked for, or
  // fewer where there were not so many rows.
  size_t streams() const { return parts.empty() ? 1 : parts.size(); }
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_API_CALL_H_
