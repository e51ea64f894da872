// What counts as a long list of documents.
#ifndef RINGATTN_COMMON_BASE_MANY_DOCUMENTS_H_
#define RINGATTN_COMMON_BASE_MANY_DOCUMENTS_H_

#include <cstdint>

namespace ringattn {

// Planning and decoding a packed request take some microseconds a document, on the coordinator and
// on each worker: milliseconds from here on. Such requests stand back behind others in both.
// Segments of a dilated request are documents of its plan (PlannedDocuments).
inline constexpr int64_t kManyDocuments = 1024;

}  // namespace ringattn

#endif  // RINGATTN_COMMON_BASE_MANY_DOCUMENTS_H_
