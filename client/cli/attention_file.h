// The tensors of an attention problem in a safetensors file: q, k, v, or packed qkv, or q and kv;
// optionally dout, out, lse, dq, dk, dv, dlse, sinks, dsinks, bias, dbias, mask, q_segment_ids,
// kv_segment_ids and alibi_slopes; and, for packed documents, cu_seqlens_q and cu_seqlens_k.
// Tests: attention_file_test.cc.
#ifndef RINGATTN_CLIENT_CLI_ATTENTION_FILE_H_
#define RINGATTN_CLIENT_CLI_ATTENTION_FILE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/api/call.h"
#include "client/cli/flags.h"
#include "client/files/safetensors.h"
#include "ringattn/v1/tensor.pb.h"

namespace ringattn::client::cli {

// Converts tensors to the type that requests have: I64 cu_seqlens and segment ids to I32, BF16 and
// F16 sinks to F32. Call it before the functions below. Errors: INVALID_ARGUMENT if a value does
// not fit.
absl::Status ConvertTensors(const std::string& path, SafetensorsFile* file);

// Reads shape and dtype of q, k, v, or of the packed ones, and cu_seqlens if there is no batch
// axis, into `problem`. Requires its options, and completes those that depend on the file: the
// shapes of bias and mask, and ALiBi slopes. Errors: INVALID_ARGUMENT, naming the file and the
// tensor that is missing, has a wrong dtype or does not match the others.
absl::Status ReadShape(const std::string& path, const SafetensorsFile& file, Problem* problem);

// Returns the bytes of a tensor, which must have the problem's shape and dtype. Errors: NOT_FOUND
// if it is not in the file; INVALID_ARGUMENT.
absl::StatusOr<ConstBytes> ReadTensor(const std::string& path, const SafetensorsFile& file,
                                      const Problem& problem, v1::TensorId tensor);

// Returns true if the request has the tensor by itself and not as a component of a packed one.
// Requires that ReadShape has succeeded.
bool TravelsAlone(const Problem& problem, v1::TensorId tensor);

// Returns the direction's inputs that only some requests have. Errors: as ReadTensor, and
// INVALID_ARGUMENT for a tensor that is in the file without its flag, because neither may be
// ignored.
absl::StatusOr<TensorMap<ConstBytes>> ReadOptionTensors(const std::string& path,
                                                        const SafetensorsFile& file,
                                                        const Problem& problem,
                                                        Direction direction);

// Returns the outputs in streaming order.
absl::StatusOr<std::vector<v1::TensorId>> OutputsOfProblem(const Problem& problem,
                                                           Direction direction);

// Returns the element type of a tensor: "bf16", "fp32", "bool", ...
std::string ElementName(const Problem& problem, v1::TensorId tensor);

// Creates a file for these tensors of the problem, with cu_seqlens if packed and `with_cu_seqlens`,
// and with ALiBi slopes if requested.
absl::StatusOr<std::unique_ptr<SafetensorsWriter>> CreateFor(
    const std::string& path, const Problem& problem, const std::vector<v1::TensorId>& tensors,
    bool with_cu_seqlens, bool with_slopes = false);

// Returns "out bf16 [1, 8192, 8, 64]".
std::string Describe(const Problem& problem, v1::TensorId tensor);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_ATTENTION_FILE_H_
