#include "server/core/ring/registration_rules.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string WhyNot(const std::function<void(v1::Register&)>& change) {
  v1::Register registration;
  registration.set_name("node-7.gpu 0");
  registration.set_memory_bytes(uint64_t{1} << 40);
  registration.add_kernel_rates()->set_flops_per_second(6e14);
  change(registration);
  return CheckRegistration(registration);
}

TEST(RegistrationRulesTest, NamesAreShortAndPrintable) {
  EXPECT_EQ(WhyNot([](auto&) {}), "");
  EXPECT_EQ(WhyNot([](auto& r) { r.set_name(std::string(128, 'a')); }), "");
  EXPECT_EQ(WhyNot([](auto& r) { r.set_name(""); }), "a worker needs a name");
  EXPECT_EQ(WhyNot([](auto& r) { r.set_name(std::string(129, 'a')); }),
            "name has 129 bytes; at most 128 are allowed");
  EXPECT_EQ(WhyNot([](auto& r) { r.set_name("a\nb"); }), "name must be printable ASCII");
  EXPECT_EQ(WhyNot([](auto& r) { r.set_name("w\xc3\xb6rker"); }), "name must be printable ASCII");
}

TEST(RegistrationRulesTest, OtherTextsAreBounded) {
  EXPECT_EQ(WhyNot([](auto& r) { r.set_device(std::string(513, 'a')); }),
            "device has 513 bytes; at most 512 are allowed");
  EXPECT_EQ(WhyNot([](auto& r) { r.add_options("\x01"); }), "options must be printable ASCII");
  EXPECT_NE(WhyNot([](auto& r) {
              for (int i = 0; i < 5000; ++i) r.add_options("causal");
            }),
            "");
}

TEST(RegistrationRulesTest, LocationsAreBounded) {
  EXPECT_EQ(WhyNot([](auto& r) { r.mutable_location()->set_host(std::string(129, 'a')); }),
            "location.host has 129 bytes; at most 128 are allowed");
  EXPECT_EQ(WhyNot([](auto& r) { r.mutable_location()->set_zone("a\nb"); }),
            "location.zone must be printable ASCII");
  const auto with_interfaces = [](int interfaces, int addresses) {
    return WhyNot([&](auto& r) {
      for (int i = 0; i < interfaces; ++i) {
        v1::NetworkInterface* interface = r.mutable_location()->add_interfaces();
        interface->set_name("eth0");
        for (int j = 0; j < addresses; ++j) interface->add_addresses("10.0.0.1");
      }
    });
  };
  EXPECT_EQ(with_interfaces(64, 64), "");
  EXPECT_EQ(with_interfaces(65, 1), "location.interfaces has 65 entries; at most 64 are allowed");
  EXPECT_EQ(with_interfaces(1, 65),
            "location.interfaces.addresses has 65 entries; at most 64 are allowed");
}

TEST(RegistrationRulesTest, FiguresAreFinite) {
  EXPECT_NE(WhyNot([](auto& r) { r.set_memory_bytes(UINT64_MAX); }), "");
  EXPECT_NE(WhyNot([](auto& r) { r.set_max_kv_cache_bytes(UINT64_MAX); }), "");
  for (const double wrong : {std::nan(""), kInfinity, -1.0}) {
    EXPECT_NE(WhyNot([&](auto& r) { r.mutable_kernel_rates(0)->set_flops_per_second(wrong); }), "");
  }
  EXPECT_NE(WhyNot([](auto& r) { r.mutable_call_overhead()->set_seconds(-1); }), "");
}

TEST(RegistrationRulesTest, MeasurementsThatAreNoRatesCountAsNone) {
  for (const double wrong : {std::nan(""), kInfinity, -1.0}) {
    v1::Committed committed;
    committed.set_generation(3);
    committed.set_link_bytes_per_second(wrong);
    committed.mutable_exchange_overhead()->set_seconds(-5);
    committed.set_host_link_bytes_per_second(wrong);
    committed.set_host_total_bytes_per_second(wrong);
    committed.mutable_host_exchange_overhead()->set_seconds(-5);
    committed = Sanitized(committed);
    EXPECT_EQ(committed.generation(), 3u);
    EXPECT_EQ(committed.link_bytes_per_second(), 0);
    EXPECT_FALSE(committed.has_exchange_overhead());
    EXPECT_EQ(committed.host_link_bytes_per_second(), 0);
    EXPECT_EQ(committed.host_total_bytes_per_second(), 0);
    EXPECT_FALSE(committed.has_host_exchange_overhead());
  }
  v1::Committed good;
  good.set_link_bytes_per_second(1e9);
  good.set_next_transport("wire");
  EXPECT_EQ(Sanitized(good).link_bytes_per_second(), 1e9);
  EXPECT_EQ(Sanitized(good).next_transport(), "wire");
  good.set_next_transport(std::string(100'000, 'x'));
  EXPECT_EQ(Sanitized(good).next_transport(), "");
}

}  // namespace
}  // namespace ringattn::server
