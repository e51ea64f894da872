// Score terms of single pairs (i, j), computed from the definition (docs/semantics.md): biases,
// masks, dropout, dilated levels. Shares no code with kernels. Private to this folder and to the
// kernels' naive twin, which uses Philox from here.
#ifndef RINGATTN_COMMON_ORACLE_PAIR_TERMS_H_
#define RINGATTN_COMMON_ORACLE_PAIR_TERMS_H_

#include <array>
#include <cstdint>

#include "common/attention/attention_spec.h"

namespace ringattn::oracle {

struct Inputs;

// Philox4x32-10: returns 128 random bits for a counter and a key.
std::array<uint32_t, 4> Philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// Returns whether dropout keeps the pair. `batch` is the batch row, or the document if packed.
bool Keeps(const DropoutForm& dropout, int64_t batch, int64_t head, int64_t i, int64_t j);

struct PairContext {
  bool visible = true;
  int64_t times = 1;            // how often the key counts: once per level that selects both
  double before_softcap = 0.0;  // added to scale * q.k
  double after_softcap = 0.0;
  double keep = 1.0;  // factor of the weight: 0, or 1 / (1 - rate)
};

// The position of a query row's head.
struct QueryPosition {
  int64_t batch = 0;
  int64_t document = 0;
  int64_t head = 0;
  int64_t i = 0;  // position in the document
};

// `spec` and `inputs` must outlive it. Immutable.
class PairTerms {
 public:
  PairTerms(const AttentionSpec& spec, const Inputs& inputs)
      : spec_(spec),
        inputs_(inputs),
        any_(HasScoreTerms(spec.options) || !spec.options.dilation_levels.empty()) {}

  // Returns all terms except the masks by position (causal, window).
  PairContext Of(const QueryPosition& query, int64_t j) const {
    return any_ ? Look(query, j) : PairContext();
  }
  bool any() const { return any_; }

 private:
  PairContext Look(const QueryPosition& query, int64_t j) const;
  double BiasOf(const QueryPosition& query, int64_t j) const;
  bool MaskAllows(const QueryPosition& query, int64_t j) const;
  bool IdsAllow(const QueryPosition& query, int64_t j) const;
  int64_t LevelsThatSelect(const QueryPosition& query, int64_t j) const;

  const AttentionSpec& spec_;
  const Inputs& inputs_;
  const bool any_;
};

// Returns the row of dbias to which a query row's head adds, as [batch][token][head] of the axes
// that the bias distinguishes.
int64_t BiasRow(const AttentionSpec& spec, int64_t batch, int64_t token, int64_t head);

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_PAIR_TERMS_H_
