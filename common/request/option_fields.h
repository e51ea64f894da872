// The options of a request, one table: what v1::AttentionOptions may hold, its rule, and how it
// travels. Whoever reads or writes options
// (the edge, Reserve, the client's own check) asks here, so that an option is either
// carried to the kernels or refused by name.
//
// Pure; thread safe.
#ifndef RINGATTN_COMMON_REQUEST_OPTION_FIELDS_H_
#define RINGATTN_COMMON_REQUEST_OPTION_FIELDS_H_

#include <string>
#include <vector>

#include "absl/types/span.h"
#include "common/attention/attention_spec.h"
#include "common/request/violations.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn {

struct OptionField {
  const char* name;  // of a field of v1::AttentionOptions
  // From the message to the value, defaults resolved, with what is wrong as violations.
  void (*read)(const v1::AttentionOptions& from, const AttentionShape& shape, AttentionOptions& to,
               Violations& violations);
  // Back. Options without effect are left unset.
  void (*write)(const AttentionOptions& from, v1::AttentionOptions& to);
  // Of one that only some devices' kernels serve: whether the options have it. Else null.
  bool (*of_device)(const AttentionOptions& options) = nullptr;
};

// One entry for each field of v1::AttentionOptions.
absl::Span<const OptionField> OptionFields();

// Values against their rule are violations.
// `shape` need not be right; defaults come from its head_dim.
AttentionOptions ReadOptions(const v1::AttentionOptions& proto, const AttentionShape& shape,
                             Violations& violations);
// Appends to an empty message.
void WriteOptions(const AttentionOptions& options, v1::AttentionOptions* proto);

// Names of the fields.
std::vector<std::string> ServedOptions();

// Of these, those that a device's kernels may lack: each worker says which its device serves.
std::vector<std::string> DeviceOptions();
// The ones among them that the options have.
std::vector<std::string> DeviceOptionsOf(const AttentionOptions& options);
// Those and what else of a request a device's kernels may lack, by a path like
// "reply.probability_rows".
std::vector<std::string> DeviceFieldsOf(const AttentionSpec& spec);
inline constexpr char kProbabilityRowsField[] = "reply.probability_rows";

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_OPTION_FIELDS_H_
