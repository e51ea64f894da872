// One random problem of the paged kernels: a cache, a step, and its inputs in host memory.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_PAGED_CASE_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_PAGED_CASE_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "worker/kernels/cuda/paged/paged_attention.h"

namespace ringattn::worker::cuda::paged::check {

// Which problems are drawn.
enum class CaseKind {
  kDecode,    // rows of up to 64 queries
  kPrefill,   // rows of more queries, and some rows of fewer
  kManyRows,  // up to 300 short rows
  kLong,      // one or two sequences of 100,000 to 1,000,000 entries
  kGrouped,   // one sequence of 100,000 to 200,000 entries, whose pieces both families merge in
              // groups
  kSmall,     // tiny, for compute-sanitizer
};

// Entries are those of the cache's part.
struct CaseRow {
  int32_t keep = 0;
  int32_t append = 0;
  int32_t queries = 0;
  int32_t sequence_length = 0;  // of all parts
  int32_t gap = 0;              // unused queries in front of the row's in q
  std::vector<int32_t> table;   // as the kernels get it: unused elements hold anything

  int32_t length() const { return keep + append; }
  int32_t first_position() const { return sequence_length - queries; }
};

struct PagedCase {
  CaseKind kind = CaseKind::kDecode;
  CacheShape shape;
  AttentionOptions options;
  BatchClass batch;
  int32_t plane = 0;
  std::vector<float> sinks;  // empty: none
  std::vector<CaseRow> rows;
  std::vector<PagedRow> paged_rows;
  std::vector<int32_t> tables;
  int64_t total_q = 0;  // gaps included

  // In the cache's dtype, as bytes. The plane holds NaN wherever no row has an entry.
  std::vector<char> q, new_k, new_v;
  std::vector<char> k_before, v_before, k_after, v_after;  // of the plane
  // The same in fp32: q, and the plane after the append.
  std::vector<float> q_values, k_values, v_values;

  std::string Describe() const;
};

PagedCase DrawCase(CaseKind kind, std::mt19937_64& random);

}  // namespace ringattn::worker::cuda::paged::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_PAGED_CASE_H_
