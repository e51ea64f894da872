#include "common/kv/block_map.h"

#include <algorithm>
#include <cassert>
#include <variant>

#include "common/kv/block_map_impl.h"
#include "common/wire/crc32c.h"

namespace ringattn {

int64_t SeenBegin(const KvLayerGroup& group, int64_t end, int64_t q_tokens) {
  if (q_tokens == 0) return end;
  if (group.window_left < 0) return 0;
  return std::clamp<int64_t>(end - q_tokens - group.window_left, 0, end);
}

void KvBlockMap::Impl::Release(uint32_t block) {
  assert(references[block] > 0);
  if (--references[block] == 0) free.Insert(block);
}

uint32_t KvBlockMap::Impl::Take(uint32_t previous) {
  const uint64_t next = uint64_t{previous} + 1;
  const uint32_t block = previous != kNoBlock && next < static_cast<uint64_t>(spec.blocks) &&
                                 free.Contains(static_cast<uint32_t>(next))
                             ? static_cast<uint32_t>(next)
                             : free.Lowest();
  free.Remove(block);
  references[block] = 1;
  taken.push_back(block);
  return block;
}

void KvBlockMap::Impl::MakeViews(const KvStep& step) {
  rows.reserve(step.rows.size());
  for (const StepRow& row : step.rows) {
    KvRowView& view = rows.emplace_back();
    view.sequence = row.sequence;
    view.keep_length = row.keep_length;
    view.append_tokens = row.append_tokens;
    view.q_tokens = row.q_tokens;
    for (const Table& table : Find(row.sequence)->tables) view.tables.push_back(table.blocks);
  }
}

KvBlockMap::KvBlockMap(const KvCacheSpec& spec, const KvPlacement& placement)
    : impl_(std::make_unique<Impl>(spec, placement)) {}
KvBlockMap::~KvBlockMap() = default;
KvBlockMap::KvBlockMap(KvBlockMap&&) noexcept = default;
KvBlockMap& KvBlockMap::operator=(KvBlockMap&&) noexcept = default;

std::vector<Refusal> KvBlockMap::Begin(const KvStep& step) {
  Impl& impl = *impl_;
  assert(!impl.begun);
  impl.free_left = impl.free.size();
  impl.refusals.clear();
  for (size_t i = 0; i < step.commands.size(); ++i) {
    const int index = static_cast<int>(i);
    if (const auto* fork = std::get_if<KvForkCommand>(&step.commands[i])) {
      impl.Fork(index, *fork);
    } else {
      impl.Drop(index, std::get<KvDropCommand>(step.commands[i]));
    }
  }
  for (size_t i = 0; i < step.rows.size(); ++i) {
    impl.ApplyRow(static_cast<int>(i), step.rows[i]);
  }
  if (!impl.refusals.empty()) {
    impl.TakeBack(/*overwritten=*/false);
    return std::move(impl.refusals);
  }
  impl.begun = true;
  impl.MakeViews(step);
  impl.crc = impl.by_sequences()
                 ? wire::Crc32c(impl.changes.data(), impl.changes.size() * sizeof(impl.changes[0]))
                 : 0;
  return {};
}

void KvBlockMap::Commit() {
  Impl& impl = *impl_;
  assert(impl.begun);
  for (const uint32_t block : impl.released) impl.Release(block);
  for (const Impl::JournalEntry& entry : impl.journal) {
    if (const auto* drop = std::get_if<Impl::Dropped>(&entry)) {
      impl.ReleaseTables(*drop->sequence);
    } else if (const auto* done = std::get_if<Impl::RowDone>(&entry); done && impl.by_sequences()) {
      impl.GiveWindowsBack(*done);
    }
  }
  for (const uint32_t block : impl.step_writes) impl.written.Insert(block);
  impl.Clear();
}

void KvBlockMap::Undo() {
  assert(impl_->begun);
  impl_->TakeBack(/*overwritten=*/true);
}

bool KvBlockMap::begun() const { return impl_->begun; }

void KvBlockMap::Settle() {
  Impl& impl = *impl_;
  assert(!impl.begun);
  if (impl.by_sequences()) {
    for (auto& [id, sequence] : impl.sequences) sequence->settled = true;
    return;
  }
  impl.sequences.clear();
  impl.table_entries = 0;
  impl.written = KvBlockSet(impl.spec.blocks, false);
}

const std::vector<KvRowView>& KvBlockMap::rows() const { return impl_->rows; }
const std::vector<KvBlockCopy>& KvBlockMap::copies() const { return impl_->copies; }
uint32_t KvBlockMap::tables_crc32c() const { return impl_->crc; }

int64_t KvBlockMap::blocks_free() const { return impl_->spec.blocks - blocks_used(); }
int64_t KvBlockMap::blocks_used() const {
  return impl_->by_sequences() ? impl_->spec.blocks - impl_->free.size() : impl_->written.size();
}
int64_t KvBlockMap::num_sequences() const { return static_cast<int64_t>(impl_->sequences.size()); }

std::vector<std::pair<SequenceId, int64_t>> KvBlockMap::sequences() const {
  std::vector<std::pair<SequenceId, int64_t>> list;
  if (!impl_->by_sequences()) return list;
  list.reserve(impl_->sequences.size());
  for (const auto& [id, sequence] : impl_->sequences) list.emplace_back(id, sequence->valid);
  std::sort(list.begin(), list.end());
  return list;
}

}  // namespace ringattn
