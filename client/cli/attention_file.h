// The tensors of an attention problem in a safetensors file: q, k, v, or packed qkv, or q and kv,
// and, as they are there, dout, out, lse, dq, dk, dv, dlse, sinks, dsinks, bias, dbias, mask,
// q_segment_ids, kv_segment_ids, alibi_slopes; cu_seqlens_q and cu_seqlens_k when packed.
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

// Reads shape and dtype of q, k, v, or of the packed ones, and, without a batch axis, cu_seqlens
// into `problem`, whose options are there: what they need of the file (the forms of a bias and a
// mask, ALiBi's slopes) is added to them. Errors: INVALID_ARGUMENT naming the file and the tensor
// that is missing, of a wrong dtype or does not fit the others.
absl::Status ReadShape(const std::string& path, const SafetensorsFile& file, Problem* problem);

// The bytes of a tensor, which must have the shape and dtype that the problem gives it.
// Errors: NOT_FOUND if it is not in the file; INVALID_ARGUMENT.
absl::StatusOr<ConstBytes> ReadTensor(const std::string& path, const SafetensorsFile& file,
                                      const Problem& problem, v1::TensorId tensor);

// Whether a request has the tensor by itself: q, k, v and their gradients may be parts of packed
// ones. REQUIRES: ReadShape has succeeded.
bool TravelsAlone(const Problem& problem, v1::TensorId tensor);

// The inputs of a direction that only some requests have. Errors: as ReadTensor, and
// INVALID_ARGUMENT for one that is in the file without its flag: neither may be ignored.
absl::StatusOr<TensorMap<ConstBytes>> ReadOptionTensors(const std::string& path,
                                                        const SafetensorsFile& file,
                                                        const Problem& problem,
                                                        Direction direction);

// The tensors that come back, in the order in which they are streamed.
absl::StatusOr<std::vector<v1::TensorId>> OutputsOfProblem(const Problem& problem,
                                                           Direction direction);

// "bf16", "fp32", "bool", ...: a tensor's elements.
std::string ElementName(const Problem& problem, v1::TensorId tensor);

// A writer for these tensors of the problem; packed, with cu_seqlens if asked for; with ALiBi's
// slopes if asked for.
absl::StatusOr<std::unique_ptr<SafetensorsWriter>> CreateFor(
    const std::string& path, const Problem& problem, const std::vector<v1::TensorId>& tensors,
    bool with_cu_seqlens, bool with_slopes = false);

// "out bf16 [1, 8192, 8, 64]"
std::string Describe(const Problem& problem, v1::TensorId tensor);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_ATTENTION_FILE_H_
