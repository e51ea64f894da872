#include "worker/device/cuda/tables/kv_resident_tables.h"

#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

using Change = KvResidentTables::Run;
using Tables = std::vector<std::vector<uint32_t>>;

constexpr int64_t kMax = 1 << 20;

std::vector<uint32_t> Ascending(uint32_t first, int64_t size) {
  std::vector<uint32_t> table(size);
  std::iota(table.begin(), table.end(), first);
  return table;
}

std::vector<DeviceKvRow> RowsOf(const Tables& tables) {
  std::vector<DeviceKvRow> rows;
  for (const std::vector<uint32_t>& table : tables) rows.push_back({0, 1, 1, 0, table});
  return rows;
}

// The device's memory. It only receives what changes() names.
class FakeMemory {
 public:
  FakeMemory() : elements_(kMax, 0xDEAD) {}

  void Copy(KvResidentTables* resident) {
    for (const Change& run : resident->changes()) {
      for (int64_t i = run.first; i < run.first + run.count; ++i) {
        elements_[i] = resident->elements()[i];
        ++copied_;
      }
    }
    resident->NoteCopied();
  }
  void Expect(const KvResidentTables& resident, const Tables& tables) const {
    for (size_t row = 0; row < tables.size(); ++row) {
      const auto first = elements_.begin() + resident.first_element(row);
      ASSERT_TRUE(std::equal(tables[row].begin(), tables[row].end(), first)) << "row " << row;
    }
  }
  int64_t TakeCopied() { return std::exchange(copied_, 0); }
  void Overwrite() { std::fill(elements_.begin(), elements_.end(), 0xDEAD); }

 private:
  std::vector<uint32_t> elements_;
  int64_t copied_ = 0;
};

TEST(KvResidentTablesTest, EqualStepsCopyNothing) {
  KvResidentTables resident(kMax);
  FakeMemory memory;
  const Tables tables = {Ascending(0, 20000), Ascending(50000, 3)};
  resident.Place(RowsOf(tables));
  memory.Copy(&resident);
  memory.Expect(resident, tables);
  EXPECT_GE(memory.TakeCopied(), 20003);
  resident.Place(RowsOf(tables));
  EXPECT_TRUE(resident.changes().empty());
}

// Tables that the device holds.
class HeldTablesTest : public testing::Test {
 protected:
  void Hold(Tables tables) {
    tables_ = std::move(tables);
    Place();
    Copy();
  }
  void Place() { resident_.Place(RowsOf(tables_)); }
  void Copy() {
    memory_.Copy(&resident_);
    memory_.Expect(resident_, tables_);
  }
  void ExpectChanges(const std::vector<Change>& changes) const {
    EXPECT_EQ(resident_.changes(), changes);
  }

  Tables tables_;
  KvResidentTables resident_{kMax};
  FakeMemory memory_;
};

TEST_F(HeldTablesTest, AnAppendedBlockIsOneElement) {
  Hold({Ascending(0, 20000), Ascending(50000, 30000)});
  const int64_t second = resident_.first_element(1);
  tables_[0].push_back(20000);
  Place();
  ExpectChanges({{20000, 1}});
  EXPECT_EQ(resident_.first_element(1), second);
  Copy();
}

TEST_F(HeldTablesTest, ABlockInTheMiddleIsReplaced) {
  Hold({Ascending(0, 20000)});
  tables_[0][7777] = 99999;
  Place();
  ExpectChanges({{7777, 1}});
  Copy();
}

TEST_F(HeldTablesTest, ChangesThatWereNotCopiedRemain) {
  Hold({Ascending(0, 60000)});
  tables_[0][5] = 1000000;
  Place();
  tables_[0][50000] = 1000001;
  Place();
  ExpectChanges({{5, 1}, {50000, 1}});
  Copy();
}

TEST_F(HeldTablesTest, ManyChangesAreOneRun) {
  Hold({Ascending(0, 200000)});
  for (const int64_t at : {0, 40000, 80000, 120000, 160000}) tables_[0][at] = 1 << 30;
  Place();
  ExpectChanges({{0, 160001}});
  Copy();
}

TEST(KvResidentTablesTest, WithoutSpareRoomTablesLieSideBySide) {
  KvResidentTables resident(1000);
  Tables tables = {Ascending(0, 500), Ascending(5000, 500)};
  resident.Place(RowsOf(tables));
  EXPECT_EQ(resident.first_element(1), 500);
}

TEST_F(HeldTablesTest, ForgottenTablesAreCopiedAgain) {
  Hold({Ascending(0, 20000)});
  memory_.Overwrite();
  resident_.Forget();
  Place();
  Copy();
}

TEST(KvResidentTablesTest, DrawnSteps) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&random](int64_t least, int64_t most) {
      return std::uniform_int_distribution<int64_t>(least, most)(random);
    };
    KvResidentTables resident(kMax);
    FakeMemory memory;
    Tables tables;
    for (int step = 0; step < 200; ++step) {
      switch (draw(0, 5)) {
        case 0:  // other sequences
          tables.clear();
          for (int64_t rows = draw(1, 20); rows > 0; --rows) {
            tables.push_back(Ascending(static_cast<uint32_t>(draw(0, 1000)), draw(0, 5000)));
          }
          break;
        case 1:
          if (!tables.empty()) tables.pop_back();
          break;
        default:
          for (std::vector<uint32_t>& table : tables) {
            if (draw(0, 3) == 0) table.push_back(static_cast<uint32_t>(draw(0, 100000)));
            if (draw(0, 9) == 0 && !table.empty()) table[draw(0, table.size() - 1)] = 7;
            if (draw(0, 9) == 0) table.resize(table.size() / 2);
          }
      }
      resident.Place(RowsOf(tables));
      if (draw(0, 3) == 0) continue;
      memory.Copy(&resident);
      memory.Expect(resident, tables);
    }
  }
}

}  // namespace
}  // namespace ringattn::worker
