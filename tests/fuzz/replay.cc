// Runs a fuzz target on every file of its corpus, without libFuzzer. A target aborts on a finding.
//   replay TARGET_CORPUS_FOLDER
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: replay CORPUS_FOLDER\n";
    return 2;
  }
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    if (!file.good() && !file.eof()) {
      std::cerr << "cannot read " << entry.path() << "\n";
      return 1;
    }
    std::cout << entry.path().filename() << ": " << bytes.size() << " bytes" << std::endl;
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    ++count;
  }
  std::cout << count << " inputs\n";
  return count > 0 ? 0 : 1;  // an empty corpus tests nothing
}
