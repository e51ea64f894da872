#include "absl/strings/str_cat.h"
#include "common/kv/block_map_impl.h"

namespace ringattn {

void KvBlockMap::Impl::Refuse(int index, bool command, RefusalReason reason, int64_t length,
                              std::string detail, int64_t blocks_missing) {
  refusals.push_back({index, command, reason, length, blocks_missing, std::move(detail)});
}

void KvBlockMap::Impl::Fork(int index, const KvForkCommand& fork) {
  const auto refuse = [&](RefusalReason reason, int64_t length, std::string detail) {
    Refuse(index, true, reason, length, std::move(detail));
  };
  if (!by_sequences()) {
    return refuse(RefusalReason::kBadRow, 0, "a cache in BLOCKS numbering has no forks");
  }
  const Sequence* source = Find(fork.source);
  if (source == nullptr) {
    return refuse(RefusalReason::kUnknownSequence, 0,
                  absl::StrCat("source ", fork.source, " does not exist"));
  }
  if (sequences.contains(fork.target) || dropped.contains(fork.target)) {
    return refuse(RefusalReason::kSequenceExists, 0,
                  absl::StrCat("target ", fork.target, " exists, or was dropped by this step"));
  }
  if (fork.length > source->valid) {
    return refuse(RefusalReason::kLengthMismatch, source->valid,
                  absl::StrCat("length is ", fork.length, "; source ", fork.source, " has ",
                               source->valid, " entries"));
  }
  if (!HasRoomForSequence()) return refuse(RefusalReason::kFull, 0, TooManySequences());
  const int64_t count = CeilDivide(fork.length, entries_per_block);
  if (table_entries + count * static_cast<int64_t>(spec.groups.size()) > kMaxTableEntries) {
    return refuse(RefusalReason::kFull, 0, TooManyEntries());
  }
  for (size_t g = 0; g < spec.groups.size() && fork.length > 0; ++g) {
    if (NeededBegin(spec.groups[g], fork.length) / entries_per_block < source->tables[g].first) {
      return refuse(RefusalReason::kBehindWindow, source->valid, BehindWindow(g, *source));
    }
  }
  auto target = NewSequence();
  target->length = target->valid = fork.length;
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    const Table& from = source->tables[g];
    Table& to = target->tables[g];
    to.blocks.assign(from.blocks.begin(), from.blocks.begin() + count);
    to.first = std::min(from.first, count);
    for (int64_t i = to.first; i < count; ++i) ++references[to.blocks[i]];
    table_entries += count;
  }
  changes.insert(changes.end(), {fork.source, fork.target, static_cast<uint64_t>(fork.length)});
  sequences.emplace(fork.target, std::move(target));
  journal.push_back(Forked{fork.target});
}

void KvBlockMap::Impl::Drop(int index, const KvDropCommand& drop) {
  for (const SequenceId id : drop.sequences) {
    auto found = sequences.find(id);
    if (found == sequences.end()) {
      Refuse(index, true, RefusalReason::kUnknownSequence, 0,
             absl::StrCat("sequence ", id, " does not exist"));
      continue;
    }
    journal.push_back(Dropped{id, std::move(found->second)});
    sequences.erase(found);
    dropped.insert(id);
    changes.push_back(id);
  }
}

std::string KvBlockMap::Impl::TooManySequences() const {
  return absl::StrCat("the cache has ", sequences.size(), " sequences, the maximum; drop some");
}

std::string KvBlockMap::Impl::TooManyEntries() {
  return absl::StrCat("the block tables of all sequences would have more than ", kMaxTableEntries,
                      " entries; drop sequences");
}

std::string KvBlockMap::Impl::BehindWindow(size_t group, const Sequence& sequence) const {
  return absl::StrCat("group ", group, " has given back entries below ",
                      sequence.tables[group].first * entries_per_block);
}

}  // namespace ringattn
