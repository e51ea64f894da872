{{/* Names and labels. */}}
{{- define "ringattn.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* 40 characters leave room for the components' suffixes and a pod's ordinal. */}}
{{- define "ringattn.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "ringattn.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "ringattn.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "ringattn.coordinatorName" -}}{{ include "ringattn.fullname" . }}-coordinator{{- end -}}
{{- define "ringattn.workerName" -}}{{ include "ringattn.fullname" . }}-worker{{- end -}}
{{- define "ringattn.controlName" -}}{{ include "ringattn.fullname" . }}-control{{- end -}}
{{- define "ringattn.workersName" -}}{{ include "ringattn.fullname" . }}-workers{{- end -}}

{{- define "ringattn.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "ringattn.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "ringattn.selectorLabels" -}}
app.kubernetes.io/name: {{ include "ringattn.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{/* {root, component} */}}
{{- define "ringattn.labels" -}}
{{ include "ringattn.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: ringattn
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods. Without the chart's version, so that a new chart version alone restarts no pod. */}}
{{- define "ringattn.podLabels" -}}
{{ include "ringattn.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: ringattn
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* name, labels, annotations of an object: {root, component, name, annotations, labels} */}}
{{- define "ringattn.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "ringattn.labels" (dict "root" .root "component" .component) | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "ringattn.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* The wildcard address: "0.0.0.0" or "[::]". */}}
{{- define "ringattn.anyHost" -}}{{ eq .Values.ipFamily "IPv6" | ternary "[::]" "0.0.0.0" }}{{- end -}}
{{/* The pod's address, as written before a port. */}}
{{- define "ringattn.podHost" -}}{{ eq .Values.ipFamily "IPv6" | ternary "[$(POD_IP)]" "$(POD_IP)" }}{{- end -}}

{{- define "ringattn.clusterSecretName" -}}
{{- default (printf "%s-cluster" (include "ringattn.fullname" .)) .Values.cluster.existingSecret -}}
{{- end -}}
{{- define "ringattn.clientsSecretName" -}}
{{- default (printf "%s-clients" (include "ringattn.fullname" .)) .Values.clients.existingSecret -}}
{{- end -}}
{{- define "ringattn.hasClients" -}}
{{- if or .Values.clients.existingSecret .Values.clients.config }}true{{ end -}}
{{- end -}}

{{/* A quantity of memory in bytes: "4Gi", "500M", 1024. */}}
{{- define "ringattn.bytes" -}}
{{- $text := . | toString -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "" 1 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- if not (hasKey $units $unit) }}{{ fail (printf "memory quantity %q is not supported; use bytes with a suffix of Ki, Mi, Gi, Ti, k, M, G, T or none" $text) }}{{ end -}}
{{- mulf (trimSuffix $unit $text | float64) (get $units $unit) | floor | int64 -}}
{{- end -}}

{{/* Number of workers per pod. */}}
{{- define "ringattn.perPod" -}}
{{- eq .Values.worker.mode "gpu" | ternary .Values.worker.gpu.perPod 1 -}}
{{- end -}}

{{/* Checks that the schema cannot express. */}}
{{- define "ringattn.check" -}}
{{- if and .Values.tls.enabled (not .Values.tls.existingSecret) }}{{ fail "tls.enabled needs tls.existingSecret: the public listener's kubernetes.io/tls Secret" }}{{ end -}}
{{- if and .Values.tls.enabled (not .Values.tls.clusterSecret) }}{{ fail "tls.enabled needs tls.clusterSecret: the kubernetes.io/tls Secret of coordinator and workers, with ca.crt" }}{{ end -}}
{{- if and (include "ringattn.hasClients" .) (not .Values.tls.enabled) }}{{ fail "clients needs tls.enabled: tokens and certificates prove nothing in plain text" }}{{ end -}}
{{- if and .Values.clients.existingSecret .Values.clients.config }}{{ fail "clients.existingSecret and clients.config exclude each other" }}{{ end -}}
{{- if and .Values.cluster.existingSecret .Values.cluster.secret }}{{ fail "cluster.existingSecret and cluster.secret exclude each other" }}{{ end -}}
{{- if and (ne .Values.worker.mode "gpu") (gt (int .Values.worker.gpu.perPod) 1) }}{{ fail "worker.gpu.perPod is for worker.mode=gpu" }}{{ end -}}
{{- if .Values.worker.gpu.peerSocketVolume }}{{ include "ringattn.checkPeerSockets" . }}{{ end -}}
{{- include "ringattn.checkTopology" . -}}
{{- include "ringattn.checkNetwork" . -}}
{{- include "ringattn.checkNccl" . -}}
{{- include "ringattn.checkClaims" . -}}
{{- end -}}

{{- define "ringattn.checkTopology" -}}
{{- $topology := .Values.worker.topology -}}
{{- if and $topology.zoneLabel $topology.zone }}{{ fail "worker.topology.zoneLabel and worker.topology.zone exclude each other" }}{{ end -}}
{{- if and (eq $topology.zonePlacement "spread") (not $topology.zoneLabel) }}{{ fail "worker.topology.zonePlacement=spread needs worker.topology.zoneLabel" }}{{ end -}}
{{- if and $topology.zoneLabel (semverCompare "<1.33.0-0" .Capabilities.KubeVersion.Version) }}{{ fail (printf "worker.topology.zoneLabel needs Kubernetes 1.33, and the cluster has %s: older ones do not copy node labels to pods; set worker.topology.zone" .Capabilities.KubeVersion.Version) }}{{ end -}}
{{- end -}}

{{- define "ringattn.checkNetwork" -}}
{{- $worker := .Values.worker -}}
{{- if and $worker.network.interfaces (eq $worker.mode "gpu") (eq $worker.gpu.ringTransport "peer") }}{{ fail "worker.network.interfaces has no effect with worker.gpu.ringTransport=peer" }}{{ end -}}
{{- $listed := merge (dict) ($worker.resources.limits | default dict) ($worker.resources.requests | default dict) -}}
{{- range $name, $count := $worker.network.resources -}}
{{- if hasKey $listed $name }}{{ fail (printf "%s is in both worker.network.resources and worker.resources; use one of them" $name) }}{{ end -}}
{{- if and (eq $worker.mode "gpu") (eq $name $worker.gpu.resourceName) }}{{ fail (printf "worker.network.resources has the GPUs' resource %s; use worker.gpu.perPod" $name) }}{{ end -}}
{{- end -}}
{{- range $name, $text := $worker.network.annotations -}}
{{- if hasKey $worker.podAnnotations $name }}{{ fail (printf "%s is in both worker.network.annotations and worker.podAnnotations; use one of them" $name) }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "ringattn.checkNccl" -}}
{{- $worker := .Values.worker -}}
{{- if $worker.nccl -}}
{{- if ne $worker.mode "gpu" }}{{ fail "worker.nccl is for worker.mode=gpu: CPU workers do not use NCCL" }}{{ end -}}
{{- if hasKey $worker.nccl "NCCL_NVLS_ENABLE" }}{{ fail "worker.nccl.NCCL_NVLS_ENABLE has no effect: workers always set it to 0" }}{{ end -}}
{{- if and $worker.network.interfaces (hasKey $worker.nccl "NCCL_SOCKET_IFNAME") }}{{ fail "worker.network.interfaces and worker.nccl.NCCL_SOCKET_IFNAME exclude each other" }}{{ end -}}
{{- end -}}
{{- if and $worker.nccl (has $worker.gpu.ringTransport (list "peer" "wire" "peer+wire")) }}{{ fail (printf "worker.nccl has no effect with worker.gpu.ringTransport=%s" $worker.gpu.ringTransport) }}{{ end -}}
{{- $names := keys $worker.nccl -}}
{{- if $worker.network.interfaces }}{{ $names = append $names "NCCL_SOCKET_IFNAME" }}{{ end -}}
{{- range $worker.extraEnv -}}
{{- if has .name $names }}{{ fail (printf "worker.extraEnv repeats %s of worker.nccl or worker.network.interfaces; use one of them" .name) }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "ringattn.checkClaims" -}}
{{- $worker := .Values.worker -}}
{{- if and (eq $worker.mode "gpu") (not $worker.gpu.resourceName) (not $worker.resourceClaims) }}{{ fail "worker.gpu.resourceName is empty: name the device plugin's resource, or allocate GPUs by worker.resourceClaims" }}{{ end -}}
{{- if and $worker.resourceClaims (semverCompare "<1.34.0-0" .Capabilities.KubeVersion.Version) }}{{ fail (printf "worker.resourceClaims needs Kubernetes 1.34, and the cluster has %s" .Capabilities.KubeVersion.Version) }}{{ end -}}
{{- $names := dict -}}
{{- range $worker.resourceClaims -}}
{{- if eq (empty .spec) (empty .resourceClaimTemplateName) }}{{ fail (printf "worker.resourceClaims %s needs either resourceClaimTemplateName or spec" .name) }}{{ end -}}
{{- if hasKey $names .name }}{{ fail (printf "worker.resourceClaims has two entries with the name %s" .name) }}{{ end -}}
{{- $_ := set $names .name true -}}
{{- end -}}
{{- range $worker.resources.claims -}}
{{- if hasKey $names .name }}{{ fail (printf "worker.resources.claims repeats %s of worker.resourceClaims" .name) }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "ringattn.checkPeerSockets" -}}
{{- $worker := .Values.worker -}}
{{- if ne $worker.mode "gpu" }}{{ fail "worker.gpu.peerSocketVolume is for worker.mode=gpu" }}{{ end -}}
{{- if gt (int $worker.gpu.perPod) 1 }}{{ fail "worker.gpu.peerSocketVolume is for pods of one GPU (worker.gpu.perPod=1): those of one pod meet without it" }}{{ end -}}
{{- if has $worker.gpu.ringTransport (list "nccl" "wire") }}{{ fail (printf "worker.gpu.peerSocketVolume has no effect with worker.gpu.ringTransport=%s" $worker.gpu.ringTransport) }}{{ end -}}
{{- if eq $worker.spread "hard" }}{{ fail "worker.gpu.peerSocketVolume keeps the pods on one node and worker.spread=hard on one each" }}{{ end -}}
{{- if not $worker.gpu.resourceName }}{{ fail "worker.gpu.peerSocketVolume needs worker.gpu.resourceName: without a device plugin a pod does not get the GPU of its number" }}{{ end -}}
{{- if semverCompare "<1.28.0-0" .Capabilities.KubeVersion.Version }}{{ fail "worker.gpu.peerSocketVolume needs Kubernetes 1.28: before it pods do not know their number" }}{{ end -}}
{{- end -}}

{{/* A gRPC probe of the plain-text health port: {root, probe, service} */}}
{{- define "ringattn.probe" -}}
grpc:
  port: {{ .root.Values.ports.health }}
  service: {{ .service }}
{{ toYaml .probe }}
{{- end -}}

{{- define "ringattn.podIdentity" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{/* Variables of worker.network.interfaces and worker.nccl. */}}
{{- define "ringattn.ncclEnv" -}}
{{- $worker := .Values.worker -}}
{{- if and $worker.network.interfaces (eq $worker.mode "gpu") (not (has $worker.gpu.ringTransport (list "wire" "peer+wire"))) }}
# "=" matches whole names.
- {name: NCCL_SOCKET_IFNAME, value: "={{ join "," $worker.network.interfaces }}"}
{{- end }}
{{- range $name, $value := .Values.worker.nccl }}
- {name: {{ $name }}, value: {{ kindIs "string" $value | ternary $value ($value | int64 | toString) | quote }}}
{{- end }}
{{- end -}}

{{/* The worker container's resources: worker.resources, GPUs, network devices and claims. */}}
{{- define "ringattn.workerResources" -}}
{{- $worker := .Values.worker -}}
{{- $resources := deepCopy $worker.resources -}}
{{- $limits := $resources.limits | default dict -}}
{{- if and (eq $worker.mode "gpu") $worker.gpu.resourceName -}}
{{- $_ := set $resources "limits" (merge (dict) $limits (dict $worker.gpu.resourceName $worker.gpu.perPod)) -}}
{{- end -}}
{{- if $worker.network.resources -}}
{{- $_ := set $resources "limits" (merge (dict) ($resources.limits | default dict) $worker.network.resources) -}}
{{- $_ := set $resources "requests" (merge (dict) ($resources.requests | default dict) $worker.network.resources) -}}
{{- end -}}
{{- if $worker.resourceClaims -}}
{{- $claims := $resources.claims | default list -}}
{{- range $worker.resourceClaims }}{{ $claims = append $claims (pick . "name" "request") }}{{ end -}}
{{- $_ := set $resources "claims" $claims -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Name of the ResourceClaimTemplate of an entry of worker.resourceClaims: {root, claim} */}}
{{- define "ringattn.claimTemplateName" -}}
{{- default (printf "%s-%s" (include "ringattn.workerName" .root) .claim.name) .claim.resourceClaimTemplateName -}}
{{- end -}}

{{/* Affinity of worker pods, unless worker.affinity is set. Empty if there is none. */}}
{{- define "ringattn.workerAffinity" -}}
{{- $worker := .Values.worker -}}
{{- $labels := include "ringattn.selectorLabels" (dict "root" . "component" "worker") | fromYaml -}}
{{- $node := list (dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" $labels)) -}}
{{- $affinity := dict -}}
{{- if and (eq $worker.mode "gpu") $worker.gpu.peerSocketVolume -}}
{{- $_ := set $affinity "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" $node) -}}
{{- else -}}
{{- if eq $worker.spread "hard" -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" $node) -}}
{{- end -}}
{{- if and $worker.topology.zoneLabel (eq $worker.topology.zonePlacement "together") -}}
{{- $zone := dict "topologyKey" $worker.topology.zoneLabel "labelSelector" (dict "matchLabels" $labels) -}}
{{- $_ := set $affinity "podAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $zone))) -}}
{{- end -}}
{{- end -}}
{{- if $affinity }}{{ toYaml $affinity }}{{ end -}}
{{- end -}}

{{/* Secrets as directories. Single files (subPath) would never be updated. */}}
{{- define "ringattn.clusterMounts" -}}
- {name: cluster-secret, mountPath: /etc/ringattn/cluster, readOnly: true}
{{- if .Values.tls.enabled }}
- {name: cluster-tls, mountPath: /etc/ringattn/cluster-tls, readOnly: true}
{{- end }}
{{- end -}}
{{- define "ringattn.clusterVolumes" -}}
- name: cluster-secret
  secret:
    secretName: {{ include "ringattn.clusterSecretName" . }}
    defaultMode: 0440
    items: [{key: {{ .Values.cluster.secretKey }}, path: secret}]
{{- if .Values.tls.enabled }}
- name: cluster-tls
  secret: {secretName: {{ .Values.tls.clusterSecret }}, defaultMode: 0440}
{{- end }}
{{- end -}}
{{- define "ringattn.clusterArgs" -}}
- --secret_file=/etc/ringattn/cluster/secret
{{- if .Values.tls.enabled }}
- --cluster_tls_cert=/etc/ringattn/cluster-tls/tls.crt
- --cluster_tls_key=/etc/ringattn/cluster-tls/tls.key
- --cluster_tls_ca=/etc/ringattn/cluster-tls/ca.crt
- --cluster_tls_server_name={{ .Values.tls.clusterServerName }}
{{- else }}
- --insecure
{{- end }}
{{- end -}}
