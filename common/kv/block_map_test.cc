#include "common/kv/block_map.h"

#include <map>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

KvCacheSpec Spec(int64_t blocks, std::vector<int64_t> windows,
                 KvNumbering numbering = KvNumbering::kSequences) {
  KvCacheSpec spec;
  spec.block_tokens = 16;
  spec.blocks = blocks;
  spec.numbering = numbering;
  for (size_t g = 0; g < windows.size(); ++g) {
    KvLayerGroup group;
    group.layers = {static_cast<uint32_t>(g)};
    group.window_left = windows[g];
    spec.groups.push_back(group);
  }
  return spec;
}

StepRow Row(SequenceId sequence, int64_t expected, int64_t keep, int64_t append, int64_t q = 0) {
  return {sequence, expected, keep, append, q, {}};
}

KvStep Rows(std::vector<StepRow> rows, std::vector<KvCommand> commands = {}) {
  return {1, std::move(commands), std::move(rows)};
}

std::vector<uint32_t> TableOf(const KvBlockMap& map, int row, int group = 0) {
  const auto table = map.rows()[row].tables[group];
  return {table.begin(), table.end()};
}

std::vector<std::string> Reasons(const std::vector<Refusal>& refusals) {
  std::vector<std::string> names;
  for (const Refusal& refusal : refusals) {
    names.push_back(absl::StrCat(refusal.command ? "command " : "row ", refusal.row, " ",
                                 Name(refusal.reason)));
  }
  return names;
}

void BeginAndCommit(KvBlockMap& map, const KvStep& step) {
  const std::vector<Refusal> refusals = map.Begin(step);
  ASSERT_THAT(Reasons(refusals), ElementsAre());
  map.Commit();
}

TEST(KvBlockMapTest, TablesAreAscendingRunsAndTheLowestNumbersComeFirst) {
  KvBlockMap map(Spec(10, {-1}), {1, 1});
  ASSERT_TRUE(map.Begin(Rows({Row(1, 0, 0, 40), Row(2, 0, 0, 16)})).empty());
  EXPECT_THAT(TableOf(map, 0), ElementsAre(0, 1, 2));
  EXPECT_THAT(TableOf(map, 1), ElementsAre(3));
  map.Commit();
  // 3 is not free, so the next number of sequence 1 is the lowest; sequence 2 stays a run.
  ASSERT_TRUE(map.Begin(Rows({Row(2, 16, 16, 1), Row(1, 40, 40, 20)})).empty());
  EXPECT_THAT(TableOf(map, 0), ElementsAre(3, 4));
  EXPECT_THAT(TableOf(map, 1), ElementsAre(0, 1, 2, 5));
  map.Commit();
  EXPECT_EQ(map.blocks_free(), 4);
  EXPECT_EQ(map.blocks_used(), 6);
  EXPECT_THAT(map.sequences(), ElementsAre(Pair(1, 60), Pair(2, 17)));
}

TEST(KvBlockMapTest, PositionPartsMakeTableEntriesLonger) {
  KvBlockMap map(Spec(10, {-1}), {1, 3});
  ASSERT_TRUE(map.Begin(Rows({Row(1, 0, 0, 49)})).empty());
  EXPECT_THAT(TableOf(map, 0), ElementsAre(0, 1));
}

TEST(KvBlockMapTest, GroupsHaveTablesOfTheirOwnAndShareNumbers) {
  KvBlockMap map(Spec(10, {-1, 20}), {1, 1});
  ASSERT_TRUE(map.Begin(Rows({Row(1, 0, 0, 30)})).empty());
  EXPECT_THAT(TableOf(map, 0, 0), ElementsAre(0, 1));
  EXPECT_THAT(TableOf(map, 0, 1), ElementsAre(2, 3));
}

TEST(KvBlockMapTest, EveryBadRowIsNamedAndNothingIsDone) {
  KvBlockMap map(Spec(4, {-1}), {1, 1});
  BeginAndCommit(map, Rows({Row(1, 0, 0, 20)}));
  const auto refusals =
      map.Begin(Rows({Row(1, 19, 19, 1), Row(2, 5, 5, 1), Row(1, 20, 20, 1), Row(3, 0, 1, 1),
                      Row(4, 0, 0, 48), Row(5, 0, 0, 16)},
                     {KvForkCommand{9, 10, 0}, KvForkCommand{1, 1, 3}, KvForkCommand{1, 11, 21},
                      KvDropCommand{{1, 77}}, KvForkCommand{1, 12, 0}}));
  EXPECT_THAT(
      Reasons(refusals),
      ElementsAre("command 0 UNKNOWN_SEQUENCE", "command 1 SEQUENCE_EXISTS",
                  "command 2 LENGTH_MISMATCH", "command 3 UNKNOWN_SEQUENCE",
                  "command 4 UNKNOWN_SEQUENCE", "row 0 UNKNOWN_SEQUENCE", "row 1 UNKNOWN_SEQUENCE",
                  "row 2 ROW_TWICE", "row 3 KEEP_BEYOND_LENGTH", "row 4 KV_FULL", "row 5 KV_FULL"));
  EXPECT_EQ(refusals[9].blocks_missing, 1);
  EXPECT_EQ(refusals[10].blocks_missing, 1);
  EXPECT_FALSE(map.begun());
  EXPECT_THAT(map.sequences(), ElementsAre(Pair(1, 20)));
  EXPECT_EQ(map.blocks_free(), 2);
  const auto mismatch = map.Begin(Rows({Row(1, 19, 19, 1)}));
  ASSERT_EQ(mismatch.size(), 1u);
  EXPECT_EQ(mismatch[0].reason, RefusalReason::kLengthMismatch);
  EXPECT_EQ(mismatch[0].length, 20);
}

TEST(KvBlockMapTest, ForksShareBlocksAndWritersCopy) {
  KvBlockMap map(Spec(10, {-1}), {1, 1});
  BeginAndCommit(map, Rows({Row(1, 0, 0, 40)}));
  BeginAndCommit(map, Rows({}, {KvForkCommand{1, 2, 36}}));
  EXPECT_EQ(map.blocks_used(), 3);
  ASSERT_TRUE(map.Begin(Rows({Row(2, 36, 36, 1)})).empty());
  EXPECT_THAT(TableOf(map, 0), ElementsAre(0, 1, 3));
  ASSERT_EQ(map.copies().size(), 1u);
  EXPECT_EQ(map.copies()[0].source, 2u);
  EXPECT_EQ(map.copies()[0].target, 3u);
  EXPECT_EQ(map.copies()[0].entries, 4);
  map.Commit();
  // No other sequence shares block 2 any longer.
  ASSERT_TRUE(map.Begin(Rows({Row(1, 40, 33, 1)})).empty());
  EXPECT_THAT(TableOf(map, 0), ElementsAre(0, 1, 2));
  EXPECT_TRUE(map.copies().empty());
  map.Commit();
  // Cutting into shared blocks copies below keep_length and leaves the others alone.
  ASSERT_TRUE(map.Begin(Rows({Row(1, 34, 8, 20)})).empty());
  EXPECT_THAT(TableOf(map, 0), ElementsAre(4, 5));
  ASSERT_EQ(map.copies().size(), 1u);
  EXPECT_EQ(map.copies()[0].source, 0u);
  EXPECT_EQ(map.copies()[0].entries, 8);
  map.Commit();
  BeginAndCommit(map, Rows({}, {KvDropCommand{{2}}}));
  EXPECT_EQ(map.blocks_used(), 2);
  BeginAndCommit(map, Rows({}, {KvDropCommand{{1}}}));
  EXPECT_EQ(map.blocks_used(), 0);
}

TEST(KvBlockMapTest, WhatAStepDropsTheNextMayUse) {
  KvBlockMap map(Spec(2, {-1}), {1, 1});
  BeginAndCommit(map, Rows({Row(1, 0, 0, 32)}));
  EXPECT_THAT(Reasons(map.Begin(Rows({Row(2, 0, 0, 1)}, {KvDropCommand{{1}}}))),
              ElementsAre("row 0 KV_FULL"));
  EXPECT_THAT(Reasons(map.Begin(Rows({Row(1, 0, 0, 1)}, {KvDropCommand{{1}}}))),
              ElementsAre("row 0 UNKNOWN_SEQUENCE"));
  BeginAndCommit(map, Rows({}, {KvDropCommand{{1}}}));
  BeginAndCommit(map, Rows({Row(1, 0, 0, 32)}));
}

TEST(KvBlockMapTest, WindowsGiveBlocksBackBehindKeepLength) {
  KvBlockMap map(Spec(20, {20}), {1, 1});
  BeginAndCommit(map, Rows({Row(1, 0, 0, 100)}));
  EXPECT_EQ(map.blocks_used(), 7);  // its keep_length is 0: all may be rolled back
  ASSERT_TRUE(map.Begin(Rows({Row(1, 100, 100, 1, 1)})).empty());
  map.Commit();  // entries below 80 go: blocks 0 to 4
  EXPECT_EQ(map.blocks_used(), 2);
  EXPECT_THAT(Reasons(map.Begin(Rows({Row(1, 101, 99, 1, 1)}))),
              ElementsAre("row 0 BEHIND_WINDOW"));
  EXPECT_THAT(Reasons(map.Begin(Rows({Row(1, 101, 101, 1, 3)}))),
              ElementsAre("row 0 BEHIND_WINDOW"));
  EXPECT_THAT(Reasons(map.Begin(Rows({}, {KvForkCommand{1, 2, 50}}))),
              ElementsAre("command 0 BEHIND_WINDOW"));
  ASSERT_TRUE(map.Begin(Rows({Row(1, 101, 100, 2, 2)}, {KvForkCommand{1, 2, 101}})).empty());
  EXPECT_EQ(TableOf(map, 0)[4], kNoBlock);
  EXPECT_NE(TableOf(map, 0)[5], kNoBlock);
  map.Commit();
  // A sequence that starts again has no precondition.
  ASSERT_TRUE(map.Begin(Rows({Row(1, 102, 0, 20, 20)})).empty());
  EXPECT_NE(TableOf(map, 0)[0], kNoBlock);
  map.Undo();
  ASSERT_TRUE(map.Begin(Rows({}, {KvDropCommand{{1, 2}}})).empty());
  map.Commit();
  EXPECT_EQ(map.blocks_used(), 0);
}

TEST(KvBlockMapTest, RanksThatUndidAStepAgreeWithRanksThatNeverBeganIt) {
  KvBlockMap undone(Spec(20, {-1}), {1, 1}), other(Spec(20, {-1}), {1, 1});
  for (KvBlockMap* map : {&undone, &other}) {
    BeginAndCommit(*map, Rows({Row(1, 0, 0, 40), Row(2, 0, 0, 40)}));
  }
  ASSERT_TRUE(undone
                  .Begin(Rows({Row(1, 40, 20, 30), Row(3, 0, 0, 16), Row(4, 30, 30, 5)},
                              {KvForkCommand{2, 4, 30}, KvDropCommand{{2}}}))
                  .empty());
  undone.Undo();
  EXPECT_EQ(undone.blocks_used(), 6);
  EXPECT_THAT(undone.sequences(), ElementsAre(Pair(1, 20), Pair(2, 40)));
  undone.Settle();
  other.Settle();
  // The writer knows the minimum over ranks.
  for (KvBlockMap* map : {&undone, &other}) {
    ASSERT_TRUE(map->Begin(Rows({Row(1, 20, 20, 1), Row(5, 0, 0, 16)})).empty());
  }
  EXPECT_EQ(undone.tables_crc32c(), other.tables_crc32c());
  EXPECT_EQ(TableOf(undone, 1), TableOf(other, 1));
  undone.Commit();
  other.Commit();
  EXPECT_EQ(undone.blocks_used(), other.blocks_used());
  EXPECT_EQ(undone.sequences(), other.sequences());
  // The next row of the sequence is held to the exact length again.
  EXPECT_THAT(Reasons(other.Begin(Rows({Row(1, 20, 20, 1)}))),
              ElementsAre("row 0 LENGTH_MISMATCH"));
}

// ------------------------------------------------------------------------ BLOCKS numbering

StepRow BlocksRow(SequenceId sequence, int64_t keep, int64_t append, int64_t q,
                  std::vector<KvTableUpdate> tables = {}) {
  return {sequence, keep, keep, append, q, std::move(tables)};
}

TEST(KvBlockMapTest, BlocksAreTheClients) {
  KvBlockMap map(Spec(10, {-1}, KvNumbering::kBlocks), {1, 1});
  ASSERT_TRUE(map.Begin(Rows({BlocksRow(1, 0, 20, 20, {{0, 0, {7, 3, 9}}}),
                              BlocksRow(2, 16, 1, 1, {{0, 0, {7, 5}}})}))
                  .empty());
  EXPECT_THAT(TableOf(map, 0), ElementsAre(7, 3, 9));
  EXPECT_EQ(map.tables_crc32c(), 0u);
  map.Commit();
  EXPECT_EQ(map.blocks_used(), 3);
  ASSERT_TRUE(map.Begin(Rows({BlocksRow(1, 32, 1, 1, {{0, 1, {4}}})})).empty());
  EXPECT_THAT(TableOf(map, 0), ElementsAre(7, 4, 9));
  map.Undo();
  map.Settle();
  EXPECT_THAT(Reasons(map.Begin(Rows({BlocksRow(1, 32, 1, 1)}))), ElementsAre("row 0 BAD_BLOCK"));
}

TEST(KvBlockMapTest, BlocksAreChecked) {
  KvBlockMap map(Spec(10, {-1, 16}, KvNumbering::kBlocks), {1, 1});
  const auto refused = [&](std::vector<StepRow> rows, std::vector<KvCommand> commands = {}) {
    return Reasons(map.Begin(Rows(std::move(rows), std::move(commands))));
  };
  EXPECT_THAT(refused({}, {KvForkCommand{1, 2, 0}}), ElementsAre("command 0 BAD_ROW"));
  EXPECT_THAT(refused({Row(1, 1, 0, 1)}), ElementsAre("row 0 LENGTH_MISMATCH"));
  EXPECT_THAT(refused({BlocksRow(1, 0, 1, 1, {{0, 0, {10}}, {1, 0, {1}}})}),
              ElementsAre("row 0 BAD_BLOCK"));
  EXPECT_THAT(refused({BlocksRow(1, 0, 1, 1, {{0, 1, {1}}})}), ElementsAre("row 0 BAD_BLOCK"));
  EXPECT_THAT(refused({BlocksRow(1, 0, 1, 1, {{2, 0, {1}}})}), ElementsAre("row 0 BAD_ROW"));
  EXPECT_THAT(refused({BlocksRow(1, 0, 1, 1, {{0, 0, {1}}, {1, 0, {1}}})}),
              ElementsAre("row 0 BLOCK_WRITTEN_TWICE"));
  EXPECT_THAT(refused({BlocksRow(1, 0, 1, 1, {{0, 0, {1}}, {1, 0, {2}}}),
                       BlocksRow(2, 0, 1, 1, {{0, 0, {2}}, {1, 0, {3}}})}),
              ElementsAre("row 1 BLOCK_WRITTEN_TWICE"));
  // Entries after the window are ignored, and one row may read what another writes.
  ASSERT_TRUE(
      map.Begin(Rows({BlocksRow(1, 40, 1, 1, {{0, 0, {1, 2, 3}}, {1, 0, {99, 4, 5}}}),
                      BlocksRow(2, 48, 1, 1, {{0, 0, {1, 2, 3, 6}}, {1, 0, {99, 99, 5, 7}}})}))
          .empty());
  map.Commit();
  EXPECT_EQ(map.num_sequences(), 2);
  BeginAndCommit(map, Rows({}, {KvDropCommand{{1, 2}}}));
  EXPECT_EQ(map.num_sequences(), 0);
}

// -------------------------------------------------------------------- random steps and a model

// A model of a rank's memory: a stamp per group, block and offset.
class Memory {
 public:
  uint64_t& At(int group, uint32_t block, int64_t offset) { return cells_[{group, block, offset}]; }

 private:
  std::map<std::tuple<int, uint32_t, int64_t>, uint64_t> cells_;
};

class RandomSteps {
 public:
  RandomSteps(uint64_t seed)
      : random_(seed),
        parts_(1 + Pick(3)),
        spec_(Spec(12 + Pick(40), {-1, static_cast<int64_t>(Pick(60))})),
        map_(spec_, {1, parts_}),
        other_(spec_, {1, parts_}) {}

  void Run(int steps) {
    for (int i = 0; i < steps && !::testing::Test::HasFailure(); ++i) OneStep();
  }

 private:
  int64_t Pick(int64_t n) { return static_cast<int64_t>(random_() % n); }
  int64_t PerBlock() const { return spec_.block_tokens * parts_; }

  KvStep Make() {
    KvStep step;
    step.number = 1;
    std::set<SequenceId> dropped;
    for (const auto& [id, entries] : contents_) {
      if (Pick(8) == 0) {
        step.commands.push_back(
            KvForkCommand{id, next_id_++, static_cast<int64_t>(Pick(entries.size() + 1))});
      } else if (Pick(6) == 0) {
        step.commands.push_back(KvDropCommand{{id}});
        dropped.insert(id);
      }
    }
    std::map<SequenceId, int64_t> lengths;
    for (const auto& [id, entries] : contents_) lengths[id] = entries.size();
    for (const KvCommand& command : step.commands) {
      if (const auto* fork = std::get_if<KvForkCommand>(&command)) {
        lengths[fork->target] = fork->length;
      }
    }
    lengths[next_id_++] = 0;
    for (const auto& [id, length] : lengths) {
      if (dropped.contains(id) || Pick(3) == 0) continue;
      const int64_t keep = Pick(3) == 0 ? Pick(length + 1) : length;
      const int64_t append = Pick(4) == 0 ? Pick(60) : Pick(3);
      step.rows.push_back(Row(id, length, keep, append, Pick(append + 2)));
    }
    return step;
  }

  void Write(const KvStep& step) {
    for (const KvBlockCopy& copy : map_.copies()) {
      for (int64_t i = 0; i < copy.entries; ++i) {
        memory_.At(copy.group, copy.target, i) = memory_.At(copy.group, copy.source, i);
      }
    }
    for (size_t r = 0; r < step.rows.size(); ++r) {
      const KvRowView& row = map_.rows()[r];
      for (size_t g = 0; g < spec_.groups.size(); ++g) {
        for (int64_t p = row.keep_length; p < row.end(); ++p) {
          memory_.At(g, row.tables[g][p / PerBlock()], p % PerBlock()) = Stamp(row.sequence, p);
        }
      }
    }
  }

  uint64_t Stamp(SequenceId id, int64_t position) const {
    return (step_ * 1000 + id) * 1'000'000 + position;
  }

  // The contents that sequences must have after `step`.
  std::map<SequenceId, std::vector<uint64_t>> After(const KvStep& step) const {
    auto after = contents_;
    for (const KvCommand& command : step.commands) {
      if (const auto* fork = std::get_if<KvForkCommand>(&command)) {
        const auto& source = contents_.at(fork->source);
        after[fork->target] = {source.begin(), source.begin() + fork->length};
      } else {
        after.erase(std::get<KvDropCommand>(command).sequences[0]);
      }
    }
    for (const StepRow& row : step.rows) {
      auto& entries = after[row.sequence];
      entries.resize(row.keep_length);
      for (int64_t p = row.keep_length; p < row.end(); ++p) {
        entries.push_back(Stamp(row.sequence, p));
      }
    }
    return after;
  }

  // Everything that a query of a row sees is what the model says.
  void Check(const std::map<SequenceId, std::vector<uint64_t>>& expected) {
    for (const KvRowView& row : map_.rows()) {
      const auto& entries = expected.at(row.sequence);
      ASSERT_EQ(row.end(), static_cast<int64_t>(entries.size()));
      for (size_t g = 0; g < spec_.groups.size(); ++g) {
        for (int64_t p = SeenBegin(spec_.groups[g], row.end(), row.q_tokens); p < row.end(); ++p) {
          const uint32_t block = row.tables[g][p / PerBlock()];
          ASSERT_LT(block, spec_.blocks);
          ASSERT_EQ(memory_.At(g, block, p % PerBlock()), entries[p])
              << "sequence " << row.sequence << " group " << g << " entry " << p;
        }
      }
    }
  }

  void OneStep() {
    ++step_;
    const KvStep step = Make();
    const bool settles = Pick(10) == 0;
    const auto refusals = map_.Begin(step);
    if (!settles || !refusals.empty()) {
      ASSERT_EQ(Reasons(other_.Begin(step)), Reasons(refusals));
    }
    if (!refusals.empty()) {
      ASSERT_EQ(map_.num_sequences(), other_.num_sequences());
      ASSERT_EQ(map_.blocks_free(), other_.blocks_free());
      // Some room for the next steps.
      if (!contents_.empty()) DropOne();
      return;
    }
    Write(step);
    const auto after = After(step);
    Check(after);
    if (!settles) {
      ASSERT_EQ(map_.tables_crc32c(), other_.tables_crc32c());
      map_.Commit();
      other_.Commit();
      contents_ = after;
    } else {
      map_.Undo();  // the other rank never began it
      map_.Settle();
      other_.Settle();
      for (const auto& [id, length] : map_.sequences()) contents_.at(id).resize(length);
    }
    ASSERT_EQ(map_.blocks_free(), other_.blocks_free());
    ASSERT_EQ(map_.num_sequences(), static_cast<int64_t>(contents_.size()));
  }

  void DropOne() {
    const SequenceId id = contents_.begin()->first;
    for (KvBlockMap* map : {&map_, &other_}) {
      ASSERT_TRUE(map->Begin(Rows({}, {KvDropCommand{{id}}})).empty());
      map->Commit();
    }
    contents_.erase(id);
    if (contents_.empty()) {
      ASSERT_EQ(map_.blocks_used(), 0);
    }
  }

  std::mt19937_64 random_;
  const int parts_;
  const KvCacheSpec spec_;
  KvBlockMap map_, other_;
  Memory memory_;
  std::map<SequenceId, std::vector<uint64_t>> contents_;
  SequenceId next_id_ = 1;
  uint64_t step_ = 0;
};

TEST(KvBlockMapTest, RandomStepsAgreeWithAModel) {
  for (uint64_t seed = 0; seed < 300 && !HasFailure(); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    RandomSteps(seed).Run(60);
  }
}

}  // namespace
}  // namespace ringattn
