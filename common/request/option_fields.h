// The options of a request, in one table: the fields of v1::AttentionOptions, their rules, and
// their conversion. The edge, Reserve and the client's check all read this table. So every option
// either reaches the kernels or is rejected by name.
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
  const char* name;  // name of the field in v1::AttentionOptions
  // Reads the field and resolves defaults. Appends violations of the field's rule.
  void (*read)(const v1::AttentionOptions& from, const AttentionShape& shape, AttentionOptions& to,
               Violations& violations);
  // Writes the field. Leaves options without effect unset.
  void (*write)(const AttentionOptions& from, v1::AttentionOptions& to);
  // For a field that only some devices' kernels support: whether the options use it. Otherwise
  // null.
  bool (*of_device)(const AttentionOptions& options) = nullptr;
};

// Returns one entry for each field of v1::AttentionOptions.
absl::Span<const OptionField> OptionFields();

// Reads all fields. `shape` may be invalid; defaults use its head_dim.
AttentionOptions ReadOptions(const v1::AttentionOptions& proto, const AttentionShape& shape,
                             Violations& violations);
// Appends to an empty message.
void WriteOptions(const AttentionOptions& options, v1::AttentionOptions* proto);

// Returns the names of all fields.
std::vector<std::string> ServedOptions();

// Returns the fields that a device's kernels may lack. Each worker reports which of them its device
// supports.
std::vector<std::string> DeviceOptions();
// Returns those of DeviceOptions that `options` uses.
std::vector<std::string> DeviceOptionsOf(const AttentionOptions& options);
// Returns DeviceOptionsOf and other fields of a request that a device's kernels may lack, as paths
// like "reply.probability_rows".
std::vector<std::string> DeviceFieldsOf(const AttentionSpec& spec);
inline constexpr char kProbabilityRowsField[] = "reply.probability_rows";

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_OPTION_FIELDS_H_
