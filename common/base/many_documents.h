// kManyDocuments: from how many documents a request counts as one with many documents.
#ifndef RINGATTN_COMMON_BASE_MANY_DOCUMENTS_H_
#define RINGATTN_COMMON_BASE_MANY_DOCUMENTS_H_

#include <cstdint>

namespace ringattn {

// Planning and decoding a packed request take a few microseconds per document, on the coordinator
// and on each worker, so requests above this number take milliseconds. Both processes schedule such
// requests after the others. The segments of a dilated request count as documents
// (PlannedDocuments).
inline constexpr int64_t kManyDocuments = 1024;

}  // namespace ringattn

#endif  // RINGATTN_COMMON_BASE_MANY_DOCUMENTS_H_
