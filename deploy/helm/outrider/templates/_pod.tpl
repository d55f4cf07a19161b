{{/* A value as the process reads it: large integers come as floats, and must not look like 1e+06. */}}
{{- define "outrider.plain" -}}
{{- if and (kindIs "float64" .) (eq (float64 (int64 .)) .) -}}
{{- int64 . -}}
{{- else if kindIs "slice" . -}}
{{- join "," . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* Variables of a process: what the chart knows, under what the values say. */}}
{{- define "outrider.variables" -}}
{{- $root := .root -}}
{{- if and (eq .role "drafter-2") (not (index $root.Values "drafter-2" "settings" "model")) -}}
{{- fail "drafter-2.settings.model is missing: name the second drafter's model" -}}
{{- end -}}
{{- $prefix := printf "OUTRIDER_%s__" (upper (trimSuffix "-2" .role)) -}}
{{- $settings := dict
  "bind" (printf "%s:%v" $root.Values.bindHost $root.Values.ports.grpc)
  "metrics_bind" (printf "%s:%v" $root.Values.bindHost $root.Values.ports.metrics)
  "log_format" "json"
  "grace_s" .own.graceSeconds -}}
{{- if eq .role "orchestrator" -}}
{{- $_ := set $settings "verifier" (include "outrider.peers" (dict "root" $root "roles" (list "verifier"))) -}}
{{- with include "outrider.peers" (dict "root" $root "roles" (list "drafter" "drafter-2" "retrieval")) -}}
{{- $_ := set $settings "drafter" . -}}
{{- end -}}
{{- if $root.Values.http.enabled -}}
{{- $_ := set $settings "http_bind" (printf "%s:%v" $root.Values.bindHost $root.Values.ports.http) -}}
{{- end -}}
{{- if $root.Values.edge.enabled -}}
{{- $_ := set $settings "edge_bind" (printf "%s:%v" $root.Values.bindHost $root.Values.ports.edge) -}}
{{- $_ := set $settings "edge_advertise" (printf "$(POD_IP):%v" $root.Values.ports.edge) -}}
{{- end -}}
{{- if or $root.Values.redis.bundled $root.Values.redis.existingSecret.name -}}
{{- $_ := set $settings "store" "redis" -}}
{{- end -}}
{{- if $root.Values.redis.bundled -}}
{{- $_ := set $settings "redis_url" (printf "redis://%s-redis:6379/0" (include "outrider.fullname" $root)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .role "orchestrator") $root.Values.edge.enabled }}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
{{- end }}
{{- range $key, $value := mergeOverwrite $settings .own.settings }}
- name: {{ $prefix }}{{ upper $key }}
  value: {{ include "outrider.plain" $value | quote }}
{{- end }}
{{- if and (eq .role "orchestrator") $root.Values.redis.existingSecret.name }}
- name: {{ $prefix }}REDIS_URL
  valueFrom:
    secretKeyRef: {{ toJson $root.Values.redis.existingSecret }}
{{- end }}
{{- range $key, $secret := .own.secretSettings }}
- name: {{ $prefix }}{{ upper $key }}
  valueFrom:
    secretKeyRef: {{ toJson $secret }}
{{- end }}
{{- if ne .role "orchestrator" }}
{{- if include "outrider.weightsClaim" $root }}
- name: HF_HOME
  value: /weights
{{- end }}
{{- if $root.Values.weights.offline }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- if $root.Values.weights.tokenSecret.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {{ toJson $root.Values.weights.tokenSecret }}
{{- end }}
{{- end }}
{{- with .own.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "outrider.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .own.shmSize }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if and .own.persistence.enabled (include "outrider.isStateful" .role) }}
- {name: data, mountPath: /data}
{{- end }}
{{- if and (ne .role "orchestrator") (include "outrider.weightsClaim" .root) }}
- {name: weights, mountPath: /weights, readOnly: {{ .root.Values.weights.readOnly }}}
{{- end }}
{{- with .own.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "outrider.volumes" -}}
- {name: tmp, emptyDir: {}}
{{- if .own.shmSize }}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .own.shmSize }}}}
{{- end }}
{{- if and (ne .role "orchestrator") (include "outrider.weightsClaim" .root) }}
- name: weights
  persistentVolumeClaim:
    claimName: {{ include "outrider.weightsClaim" .root }}
    readOnly: {{ .root.Values.weights.readOnly }}
{{- end }}
{{- with .own.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "outrider.container" -}}
{{- $root := .root -}}
{{- $own := .own -}}
name: {{ .role }}
image: {{ include "outrider.image" (dict "root" $root "own" $own) }}
imagePullPolicy: {{ $own.image.pullPolicy }}
{{- with $own.extraArgs }}
args: {{ toJson . }}
{{- end }}
env:
  {{- include "outrider.variables" . | trim | nindent 2 }}
{{- with $own.envFromSecret }}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end }}
ports:
  - {name: grpc, containerPort: {{ $root.Values.ports.grpc }}, protocol: TCP}
  - {name: metrics, containerPort: {{ $root.Values.ports.metrics }}, protocol: TCP}
  {{- if and (eq .role "orchestrator") $root.Values.http.enabled }}
  - {name: http, containerPort: {{ $root.Values.ports.http }}, protocol: TCP}
  {{- end }}
  {{- if and (eq .role "orchestrator") $root.Values.edge.enabled }}
  - {name: edge, containerPort: {{ $root.Values.ports.edge }}, protocol: TCP}
  {{- end }}
startupProbe:
  {{- include "outrider.probe" (dict "path" "/readyz" "probe" $own.startupProbe) | nindent 2 }}
livenessProbe:
  {{- include "outrider.probe" (dict "path" "/healthz" "probe" $own.livenessProbe) | nindent 2 }}
readinessProbe:
  {{- include "outrider.probe" (dict "path" "/readyz" "probe" $own.readinessProbe) | nindent 2 }}
{{- if gt (int $own.preStopSeconds) 0 }}
lifecycle:
  preStop:
    exec:
      command: [sleep, {{ $own.preStopSeconds | toString | quote }}]
{{- end }}
{{- $resources := deepCopy $own.resources }}
{{- if gt (int $own.gpu.count) 0 }}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict $own.gpu.resource (int $own.gpu.count))) }}
{{- end }}
resources:
  {{- toYaml $resources | nindent 2 }}
securityContext:
  {{- toYaml $own.containerSecurityContext | nindent 2 }}
volumeMounts:
  {{- include "outrider.mounts" . | nindent 2 }}
{{- end -}}

{{- define "outrider.pod" -}}
{{- $own := .own -}}
{{- $grace := $own.graceSeconds -}}
{{- if hasKey $own.settings "grace_s" -}}
{{- $grace = ceil $own.settings.grace_s -}}
{{- end -}}
serviceAccountName: {{ include "outrider.serviceAccount" .root }}
automountServiceAccountToken: false
# Kubernetes' own variables would look like settings.
enableServiceLinks: false
# preStop, calls that go on, held streams after them, and time to leave.
terminationGracePeriodSeconds: {{ add (int $own.preStopSeconds) (mul 2 (int $grace)) 10 }}
securityContext:
  {{- toYaml $own.securityContext | nindent 2 }}
{{- range $key := list "imagePullSecrets" "nodeSelector" "affinity" "tolerations" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" "schedulerName" "initContainers" }}
{{- with index $own $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
containers:
  - {{- include "outrider.container" . | nindent 4 }}
volumes:
  {{- include "outrider.volumes" . | nindent 2 }}
{{- end -}}
