#include "worker/kernels/cuda/paged/work_split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "worker/kernels/cuda/paged/parts_test_rows.h"

namespace ringattn::worker::cuda::paged {
namespace {

constexpr int kTile = 128;

PagedRow Row(int32_t first_q, int32_t q_tokens, int32_t keep, int32_t append) {
  PagedRow row;
  row.first_q = first_q;
  row.q_tokens = q_tokens;
  row.keep_length = keep;
  row.append_tokens = append;
  return row;
}

// Key by key and query by query.
KeySpan PlainVisible(const PagedRow& row, const MaskRule& mask, int32_t q_begin, int32_t q_end) {
  int32_t first = -1, last = -1;
  for (int32_t j = 0; j < LengthOf(row); ++j) {
    for (int32_t q = q_begin; q < q_end; ++q) {
      const int64_t position = int64_t{LengthOf(row)} - row.q_tokens + q;
      if (mask.causal != 0 && j > position) continue;
      if (mask.window_left >= 0 && j < position - mask.window_left) continue;
      if (first < 0) first = j;
      last = j;
    }
  }
  if (first < 0) return {0, 0};
  return {first, last + 1};
}

TEST(WorkSplit, VisibleKeysAreThosePlainLoopsFind) {
  std::mt19937 random(1);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int i = 0; i < 4000; ++i) {
    const PagedRow row = Row(0, draw(1, 12), draw(0, 30), draw(0, 8));
    const MaskRule mask{draw(0, 1), draw(0, 2) == 0 ? draw(0, 20) : -1};
    const int32_t q_begin = draw(0, row.q_tokens - 1);
    const int32_t q_end = draw(q_begin + 1, row.q_tokens);
    const KeySpan expected = PlainVisible(row, mask, q_begin, q_end);
    const KeySpan found = VisibleKeys(row, mask, q_begin, q_end);
    EXPECT_EQ(found.begin, expected.begin);
    EXPECT_EQ(found.end, expected.end);
  }
}

TEST(WorkSplit, APartSeesItsOwnEntriesThatPlainLoopsFind) {
  std::mt19937 random(3);
  for (int i = 0; i < 2000; ++i) {
    const PartCase c = DrawPartCase(random, 40, 5);
    const auto local = static_cast<int32_t>(c.places.size());
    for (int32_t e = 0; e < local; ++e) {
      EXPECT_EQ(LocalBelow(c.mask.part, c.places[e]), e);
      EXPECT_EQ(e + ShiftOfBlock(c.mask.part, e >> c.mask.part.block_shift), c.places[e]);
    }
    EXPECT_EQ(LocalBelow(c.mask.part, c.length), local);
    for (int32_t q = 0; q < c.row.q_tokens; ++q) {
      const KeySpan found = VisibleKeys(c.row, c.mask, q, q + 1);
      for (int32_t e = 0; e < local; ++e) {
        EXPECT_EQ(c.Sees(q, e), e >= found.begin && e < found.end);
      }
    }
    const KeySpan any = VisibleKeys(c.row, c.mask, 0, c.row.q_tokens);
    const KeySpan all = CommonKeys(c.row, c.mask, 0, c.row.q_tokens);
    for (int32_t e = 0; e < local; ++e) {
      int32_t seen = 0;
      for (int32_t q = 0; q < c.row.q_tokens; ++q) seen += c.Sees(q, e) ? 1 : 0;
      EXPECT_TRUE(seen == 0 || (e >= any.begin && e < any.end));
      EXPECT_EQ(seen == c.row.q_tokens, e >= all.begin && e < all.end);
    }
  }
}

TEST(WorkSplit, LargeWindowsAndLengthsDoNotOverflow) {
  const PagedRow row = Row(0, 2, 2147483000, 600);
  const KeySpan all = VisibleKeys(row, {1, 2147483647}, 0, 2);
  EXPECT_EQ(all.begin, 0);
  EXPECT_EQ(all.end, 2147483600);
  const KeySpan none = VisibleKeys(Row(0, 64, 0, 3), {1, -1}, 0, 61);
  EXPECT_EQ(none.begin, 0);
  EXPECT_EQ(none.end, 0);
  // The last entry of 2^30, on the last part of 65536.
  const PartRule part{65536, 65535, 8};
  EXPECT_EQ(LocalBelow(part, int64_t{1} << 30), int64_t{1} << 14);
  EXPECT_EQ((int64_t{1} << 14) - 1 + ShiftOfBlock(part, 63), (int64_t{1} << 30) - 1);
}

// Every piece belongs to one group, no group has more than 16 pieces, and a merge in groups pays.
TEST(WorkSplit, GroupsHoldEveryPieceOnce) {
  int32_t grouped = 0;
  for (int32_t rows = 1; rows <= 64; ++rows) {
    for (int32_t pieces = 1; pieces <= kMaxSplits; ++pieces) {
      const MergeGroups groups = MergeGroupsOf(rows, pieces);
      ASSERT_GE(groups.size, 1);
      int32_t sum = 0;
      for (int32_t group = 0; group < groups.count; ++group) {
        ASSERT_GE(groups.PiecesOf(group, pieces), 1);
        sum += groups.PiecesOf(group, pieces);
      }
      ASSERT_EQ(sum, pieces);
      ASSERT_EQ((pieces - 1) / groups.size, groups.count - 1);
      if (groups.count == 1) {
        ASSERT_EQ(groups.size, pieces);
        continue;
      }
      ++grouped;
      ASSERT_LE(groups.size, 16);
      ASSERT_LE(groups.count, groups.size);
      ASSERT_GT(rows * (pieces - groups.size - groups.count), kMinGroupedGain);
    }
  }
  EXPECT_GT(grouped, 0);
  // The rows of one kv head on a whole H200, and of 8 kv heads.
  EXPECT_EQ(MergeGroupsOf(32, 132).count, 11);
  EXPECT_EQ(MergeGroupsOf(4, 16).count, 1);
  for (int32_t index = 0; index < kMaxSplits; ++index) {
    EXPECT_EQ(PieceIndex(7, PieceSlot(7, index)), index);
  }
}

// Every tile of every unit belongs to exactly one column, pieces are counted as they are, columns
// are even, and no two pieces share a slot.
TEST(WorkSplit, ColumnsShareAllTilesOnce) {
  std::mt19937 random(2);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int round = 0; round < 300; ++round) {
    const UnitRule rule{{draw(0, 1), draw(0, 2) == 0 ? draw(0, 5000) : -1}, 64, draw(1, 64)};
    std::vector<PagedRow> rows;
    int32_t q = 0;
    for (int r = draw(0, 40); r >= 0; --r) {
      const int32_t q_tokens = draw(0, 3) == 0 ? draw(0, 100) : draw(0, 3);
      rows.push_back(
          Row(q, q_tokens, draw(0, 1) == 0 ? draw(0, 300) : draw(0, 200000), draw(0, 9)));
      q += q_tokens;
    }
    int64_t total = 0;
    for (const PagedRow& row : rows) total += CostOf<kTile>(row, rule);
    if (total == 0) continue;
    const ColumnDeal deal(total, draw(1, 140));
    std::map<int32_t, int32_t> pieces_found, pieces_claimed;
    std::map<int32_t, std::vector<bool>> tiles_done;
    std::set<int32_t> slots;
    std::set<int32_t> tickets, group_tickets;
    int64_t most = 0, least = total;
    for (int32_t column = 0; column < deal.columns; ++column) {
      const int64_t x_begin = deal.Begin(column), x_end = deal.Begin(column + 1);
      ASSERT_LT(x_begin, x_end);
      EXPECT_EQ(deal.ColumnOf(x_begin), column);
      EXPECT_EQ(deal.ColumnOf(x_end - 1), column);
      most = std::max(most, x_end - x_begin);
      least = std::min(least, x_end - x_begin);
      int64_t base = 0;
      for (size_t r = 0; r < rows.size(); ++r) {
        const int32_t tiles = UnitTiles<kTile>(rows[r], rule).count();
        for (int32_t unit = 0; unit < UnitsOf(rows[r], rule); ++unit) {
          const int64_t next = base + tiles + kUnitOverhead;
          if (base < x_end && x_begin < next) {
            const UnitPiece piece = PieceOf(deal, base, tiles, x_begin, x_end);
            const int32_t ticket =
                TicketOf(rows[r], static_cast<int32_t>(r), unit, rule.unit_queries);
            if (piece.begin < piece.end) {
              EXPECT_LT(ticket, TicketsOf(q, rows.size(), rule.unit_queries));
              std::vector<bool>& done = tiles_done[ticket];
              done.resize(tiles);
              for (int32_t t = piece.begin; t < piece.end; ++t) {
                EXPECT_FALSE(done[t]);
                done[t] = true;
              }
              if (column == piece.first_column) {
                EXPECT_TRUE(tickets.insert(ticket).second);
              }
              const int32_t index = column - piece.first_column;
              EXPECT_EQ(pieces_found[ticket]++, index);
              pieces_claimed[ticket] = piece.pieces;
              if (piece.pieces > 1) {
                const int32_t slot = PartialSlot(column, piece.begin == 0);
                EXPECT_EQ(slot, PieceSlot(PartialSlot(piece.first_column, true), index));
                EXPECT_TRUE(slots.insert(slot).second);
                const int32_t first_slot = PartialSlot(piece.first_column, true);
                const MergeGroups groups = MergeGroupsOf(64, piece.pieces);
                const int32_t group = index / groups.size;
                const int32_t group_ticket = GroupTicketOf(first_slot, groups, group);
                EXPECT_LT(group_ticket, SlotsOf(deal.columns));
                if (index % groups.size == 0) {
                  EXPECT_EQ(group_ticket, slot);
                  EXPECT_TRUE(group_tickets.insert(group_ticket).second);
                }
              }
            }
          }
          base = next;
        }
      }
      EXPECT_EQ(base, total);
    }
    EXPECT_LE(most - least, 1);
    EXPECT_EQ(pieces_found, pieces_claimed);
    for (const auto& [ticket, done] : tiles_done) {
      EXPECT_TRUE(std::all_of(done.begin(), done.end(), [](bool x) { return x; }));
    }
    size_t units = 0;
    for (const PagedRow& row : rows) units += UnitsOf(row, rule);
    EXPECT_EQ(tiles_done.size(), units);
  }
}

}  // namespace
}  // namespace ringattn::worker::cuda::paged
