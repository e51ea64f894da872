#include "tests/sweep/reference_problems.h"

#include "common/layout/dilation.h"

namespace ringattn::tests {

ReferenceProblems::ReferenceProblems(const AttentionSpec& spec, const ShardPlan& plan,
                                     const Schedule& schedule, Cut cut)
    : spec_(spec), plan_(plan), cut_(cut), problem_(ReferenceProblemOf(spec)) {
  if (!schedule.programs.empty()) problem_.tuning = schedule.programs[0].tuning;
  parts_ = ReferencePartsOf(spec, plan, problem_);
  if (cut == Cut::kPieces) CutPartsIntoPieces();
}

void ReferenceProblems::CutPartsIntoPieces() {
  const std::vector<DilatedPart> parts = DilatedPartsOf(spec_, plan_);
  for (size_t i = 0; i < parts_.size(); ++i) {
    const AttentionShape& shape = parts.at(i).spec.shape;
    for (int rank = 0; rank < plan_.world_size; ++rank) {
      parts_[i].q[rank].pieces = QueryPieces(shape, parts[i].plan.q[rank]);
      parts_[i].kv[rank].pieces = KeyPieces(shape, parts[i].plan.kv[rank]);
    }
  }
}

std::vector<Piece> ReferenceProblems::Pieces(const Shard& shard,
                                             const std::vector<int64_t>& cu_seqlens, int64_t begin,
                                             int64_t end) const {
  if (cut_ == Cut::kPieces) return SlicePieces(CutIntoPieces(shard, cu_seqlens), begin, end);
  const std::vector<int64_t> tokens = TokensOf(shard);
  return RowPieces({tokens.begin() + begin, tokens.begin() + end}, cu_seqlens);
}

}  // namespace ringattn::tests
