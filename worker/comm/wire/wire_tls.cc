// TLS 1.3 streams by OpenSSL.
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/comm/wire/wire_stream.h"

namespace ringattn::worker {
namespace {

// A TLS record. Parts that fit into one are sent as one.
constexpr size_t kRecordBytes = 16384;
constexpr size_t kBindingBytes = 32;
constexpr char kBindingLabel[] = "EXPERIMENTAL-ringattn-wire";
// The first is the fastest on processors with AES instructions.
constexpr char kCiphers[] =
    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";

struct FreeOpenSsl {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
template <typename T>
using OpenSslPtr = std::unique_ptr<T, FreeOpenSsl>;

class TlsStream : public WireStream {
 public:
  TlsStream(int fd, OpenSslPtr<SSL> ssl) : WireStream(fd), ssl_(std::move(ssl)) {}

  Result Handshake() override {
    Begin();
    const int done = SSL_do_handshake(ssl_.get());
    if (done == 1) return {.bytes = 1};
    return ResultOf(done);
  }

  std::string Binding() override {
    std::string binding(kBindingBytes, '\0');
    const int done = SSL_export_keying_material(
        ssl_.get(), reinterpret_cast<unsigned char*>(binding.data()), binding.size(), kBindingLabel,
        sizeof(kBindingLabel) - 1, nullptr, 0, 0);
    // Without the binding the proof of the token would be worth less than in plain text.
    if (done != 1) std::abort();
    return binding;
  }

  Result Read(char* data, size_t bytes) override {
    size_t got = 0;
    Begin();
    const int done = SSL_read_ex(ssl_.get(), data, bytes, &got);
    return done == 1 ? Result{.bytes = got} : ResultOf(done);
  }

  Result Write(const iovec* parts, int count) override {
    size_t total = 0;
    for (int i = 0; i < count; ++i) total += parts[i].iov_len;
    const void* data = parts[0].iov_base;
    size_t bytes = parts[0].iov_len;
    char record[kRecordBytes];
    if (count > 1 && total <= sizeof(record)) {
      bytes = 0;
      for (int i = 0; i < count; ++i) {
        std::memcpy(record + bytes, parts[i].iov_base, parts[i].iov_len);
        bytes += parts[i].iov_len;
      }
      data = record;
    }
    size_t sent = 0;
    Begin();
    const int done = SSL_write_ex(ssl_.get(), data, bytes, &sent);
    return done == 1 ? Result{.bytes = sent} : ResultOf(done);
  }

  bool HasBuffered() const override { return SSL_pending(ssl_.get()) > 0; }
  bool WantsWrite() const override { return wants_write_; }

 private:
  void Begin() {
    ERR_clear_error();
    wants_write_ = false;
  }

  Result ResultOf(int done) {
    const int system_error = errno;
    const int error = SSL_get_error(ssl_.get(), done);
    wants_write_ = error == SSL_ERROR_WANT_WRITE;
    if (wants_write_ || error == SSL_ERROR_WANT_READ) return {};
    if (error == SSL_ERROR_SYSCALL && system_error != 0) return Failed(system_error);
    const unsigned long detail = ERR_peek_error();
    ERR_clear_error();
    const bool ended = error == SSL_ERROR_ZERO_RETURN || error == SSL_ERROR_SYSCALL ||
                       ERR_GET_REASON(detail) == SSL_R_UNEXPECTED_EOF_WHILE_READING;
    if (ended) return {.failure = WireFailure::kClosed, .why = "the peer closed the connection"};
    const long verified = SSL_get_verify_result(ssl_.get());
    const char* const reason = ERR_reason_error_string(detail);
    std::string why = absl::StrCat("TLS: ", reason != nullptr ? reason : "unknown error");
    if (verified != X509_V_OK) {
      absl::StrAppend(&why, " (", X509_verify_cert_error_string(verified), ")");
    }
    return {.failure = WireFailure::kTls, .why = std::move(why)};
  }

  const OpenSslPtr<SSL> ssl_;
  bool wants_write_ = false;
};

class OpenSslTls : public WireTls {
 public:
  explicit OpenSslTls(OpenSslPtr<SSL_CTX> context) : context_(std::move(context)) {}

  std::unique_ptr<WireStream> Wrap(int fd, bool connector) override {
    OpenSslPtr<SSL> ssl(SSL_new(context_.get()));
    if (ssl == nullptr || SSL_set_fd(ssl.get(), fd) != 1) std::abort();  // out of memory
    if (connector) {
      SSL_set_connect_state(ssl.get());
    } else {
      SSL_set_accept_state(ssl.get());
    }
    return std::make_unique<TlsStream>(fd, std::move(ssl));
  }

 private:
  const OpenSslPtr<SSL_CTX> context_;
};

OpenSslPtr<BIO> OpenPem(const std::string& pem) {
  return OpenSslPtr<BIO>(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// The material has no pass phrases (ReadTlsFiles), so nobody is prompted.
int NoPassPhraseForWire(char*, int, int, void*) { return -1; }

bool UseIdentity(const std::string& pem, SSL_CTX* context) {
  const OpenSslPtr<BIO> keys = OpenPem(pem), certificates = OpenPem(pem);
  const OpenSslPtr<EVP_PKEY> key(
      PEM_read_bio_PrivateKey(keys.get(), nullptr, NoPassPhraseForWire, nullptr));
  const OpenSslPtr<X509> own(
      PEM_read_bio_X509(certificates.get(), nullptr, NoPassPhraseForWire, nullptr));
  if (key == nullptr || own == nullptr) return false;
  if (SSL_CTX_use_certificate(context, own.get()) != 1) return false;
  if (SSL_CTX_use_PrivateKey(context, key.get()) != 1) return false;
  while (true) {
    const OpenSslPtr<X509> next(
        PEM_read_bio_X509(certificates.get(), nullptr, NoPassPhraseForWire, nullptr));
    if (next == nullptr) return true;
    if (SSL_CTX_add1_chain_cert(context, next.get()) != 1) return false;
  }
}

bool UseAuthorities(const std::string& pem, SSL_CTX* context) {
  const OpenSslPtr<BIO> bio = OpenPem(pem);
  X509_STORE* const store = SSL_CTX_get_cert_store(context);
  // An authority may be an intermediate one, as for gRPC.
  X509_STORE_set_flags(store, X509_V_FLAG_PARTIAL_CHAIN | X509_V_FLAG_TRUSTED_FIRST);
  bool any = false;
  while (true) {
    const OpenSslPtr<X509> next(
        PEM_read_bio_X509(bio.get(), nullptr, NoPassPhraseForWire, nullptr));
    if (next == nullptr) return any;
    if (X509_STORE_add_cert(store, next.get()) != 1) return false;
    any = true;
  }
}

}  // namespace

absl::StatusOr<std::shared_ptr<WireTls>> WireTls::Make(const TlsMaterial& material) {
  std::signal(SIGPIPE, SIG_IGN);
  OpenSslPtr<SSL_CTX> context(SSL_CTX_new(TLS_method()));
  if (context == nullptr) return absl::InternalError("SSL_CTX_new failed");
  SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION);
  SSL_CTX_set_ciphersuites(context.get(), kCiphers);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  SSL_CTX_set_mode(context.get(),
                   SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  // Connections are never resumed.
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context.get(), 0);
  const bool usable = UseIdentity(material.identity_pem, context.get()) &&
                      UseAuthorities(material.authorities_pem, context.get());
  ERR_clear_error();
  if (!usable) {
    return absl::InvalidArgumentError(
        "TLS between workers needs a certificate, its key and authorities");
  }
  return std::make_shared<OpenSslTls>(std::move(context));
}

}  // namespace ringattn::worker
