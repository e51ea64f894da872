// Reads dilated levels from the message and writes them back.
//
// Pure; thread safe.
#ifndef RINGATTN_COMMON_REQUEST_DILATION_LEVELS_H_
#define RINGATTN_COMMON_REQUEST_DILATION_LEVELS_H_

#include "common/attention/attention_spec.h"
#include "common/request/violations.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn {

// A single level that lets every row of every head see every key is dropped. `shape` may be
// invalid.
void ReadDilationLevels(const v1::AttentionOptions& from, const AttentionShape& shape,
                        AttentionOptions& to, Violations& violations);
void WriteDilationLevels(const AttentionOptions& from, v1::AttentionOptions& to);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_DILATION_LEVELS_H_
